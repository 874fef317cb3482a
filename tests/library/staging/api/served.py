"""`Served`: a real server in a thread, on a free port, with requests to it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from sqlalchemy import Row, select, update

from index.version import Version
from regraft.connection import certificates
from service.http.app import create_app
from service.http.server.http_protocol import HttpProtocol
from service.runtime import Runtime
from service.settings import Settings
from service.store.tables import backfill, embedding, gallery, item
from staging.inputs.builders import make_version, tell_variance, zip_version
from staging.states.working import work

Edges = Sequence[tuple[Any, ...]]
JSON = {"content-type": "application/json"}
"""Headers of bodies that tests write as text, because strict libraries would refuse some of them."""

names = (f"g{number}" for number in itertools.count())


@dataclass
class Served:
    """A running server: `http` is a client of it, `runtime` are its parts."""

    http: httpx.Client
    runtime: Runtime
    versions: dict[str, Version] = field(default_factory=dict)
    """The registered versions, by name."""

    @property
    def url(self) -> str:
        """The address of the server, as a client of ours takes it."""
        return str(self.http.base_url).removesuffix("/v1/")

    def add(self, name: str, dim: int, *, variance: str = "", edges: Edges = (), **about: Any) -> Version:
        """Build and register a version; `edges`: to old versions; `variance`: whose item edge has a variance."""
        folder = self.runtime.settings.data.parent / f"{self.runtime.settings.data.name}-added" / name
        known = [(self.versions[old], *kind) for old, *kind in edges]
        made = make_version(folder, name, dim, edges=known, **about)
        made = tell_variance(made, variance) if variance else made
        assert self.register(made).status_code == 201
        return made

    def filled(
        self,
        pictures: Sequence[bytes],
        version: str = "v1",
        new: str = "",
        about: Callable[[int], dict[str, Any]] = lambda number: {},
    ) -> str:
        """A new gallery of `version` with the items i0, i1, ... of these images; then `new`, if any, is deployed."""
        path = self.gallery(version)
        files = [(f"{number}.png", picture) for number, picture in enumerate(pictures)]
        items = [{"id": f"i{n}", "metadata": about(n), "image": name} for n, (name, _) in enumerate(files)]
        stored = self.post_items(path, items, files)
        assert stored.json()["failed"] == 0, stored.text
        if new:
            self.deploy(path, new)
        return path

    def deploy(self, path: str, version: str, **fields: Any) -> dict[str, Any]:
        """Deploy a version; must be accepted."""
        answer = self.http.post(f"{path}/deployments", json={"version": version, **fields})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def backfill(self, path: str, **fields: Any) -> int:
        """Start a backfill; returns its number."""
        answer = self.http.post(f"{path}/backfills", json=fields)
        assert answer.status_code == 202, answer.text
        return int(answer.json()["id"])

    def remove(self, path: str, **params: Any) -> Any:
        """Delete something other than an item."""
        return self.http.delete(path, params={"confirm": path.rpartition("/")[2], **params})

    def gallery(self, version: str | None = "v1") -> str:
        """A new gallery with `version` deployed; returns its path."""
        path = f"/galleries/{next(names)}"
        assert self.http.post("/galleries", json={"name": path.rpartition("/")[2]}).status_code == 201
        if version:
            self.deploy(path, version)
        return path

    def work(self, chunks: int | None = None) -> None:
        """Let a worker do this many chunks, or all work, and the replica follow."""
        work(self.runtime.settings, chunks)
        for loaded in self.runtime.replica.all():
            self.runtime.replica.refresh(loaded.id)

    def stored(self, path: str, version: str) -> dict[str, Row[Any, Any, Any, Any]]:
        """The embeddings of a version in a gallery: id -> origin, vector, side."""
        columns = (item.c.external_id, embedding.c.origin, embedding.c.vector, embedding.c.side)
        held = select(*columns).join(item, item.c.id == embedding.c.item_id).join(gallery)
        of_version = embedding.c.version_id == self.runtime.registry.named(version).id
        mine = (gallery.c.name == path.rpartition("/")[2], of_version)
        with self.runtime.database.lookup() as connection:
            return {row.external_id: row for row in connection.execute(held.where(*mine))}

    def cancel_backfills(self) -> None:
        """Cancel all backfills, in the database."""
        with self.runtime.database.write() as connection:
            connection.execute(update(backfill).where(backfill.c.state == "running").values(state="cancelled"))

    def ingest(self, path: str, images: dict[str, bytes], **metadata: Any) -> httpx.Response:
        """Store images by id."""
        items = [{"id": i, "metadata": metadata, "image": f"{n}.png"} for n, i in enumerate(images)]
        return self.post_items(path, items, [(f"{n}.png", image) for n, image in enumerate(images.values())])

    def store(self, path: str, about: dict[str, Any]) -> None:
        """Store items with these metadata by id, and vectors of two numbers."""
        items = [{"id": key, "metadata": one, "embedding": [n, 0]} for n, (key, one) in enumerate(about.items())]
        answer = self.http.post(f"{path}/items", content=json.dumps({"items": items}), headers=JSON)
        assert answer.json()["failed"] == 0, answer.text

    def post_items(self, path: str, items: Any, files: Sequence[tuple[str, bytes]], **params: Any) -> httpx.Response:
        """A multipart ingest with these exact parts."""
        data = {"items": items if isinstance(items, str) else json.dumps(items)}
        return self.http.post(f"{path}/items", data=data, files=[("images", file) for file in files], params=params)

    def query(self, path: str, *images: bytes, **fields: Any) -> httpx.Response:
        """A multipart query."""
        files = [("images", (f"{n}.png", image)) for n, image in enumerate(images)]
        return self.http.post(
            f"{path}/query",
            data={k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in fields.items()},
            files=files,
        )

    def register(self, version: Version) -> httpx.Response:
        """Send a version folder."""
        self.versions[version.name] = version
        return self.http.post("/versions", files={"archive": ("v.zip", zip_version(version.folder))})


@contextmanager
def serving(settings: Settings, **headers: str) -> Iterator[Served]:
    """Serve in a thread on a free port."""
    app = create_app(settings)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, http=HttpProtocol, access_log=False, log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}/v1", headers=headers, timeout=30, verify=certificates()
        ) as http:
            yield Served(http, app.state.runtime)
    finally:
        server.should_exit = True
        thread.join()


def problem(response: httpx.Response, status: int, code: str, pointer: str | None = None) -> dict[str, Any]:
    """Assert that a response is the expected problem+json, and return it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    told: dict[str, Any] = response.json()
    assert told["status"] == status
    assert told["code"] == code, told
    assert told["detail"]
    assert told["title"]
    assert told["type"].endswith(code)
    assert told["request_id"] == response.headers["x-request-id"]
    if pointer is not None:
        assert pointer in [error["pointer"] for error in told["errors"]], told
    return told


def ids(response: httpx.Response) -> list[list[str]]:
    """Assert that a query was answered, and return the ids of its matches."""
    assert response.status_code == 200, response.text
    return [[m["id"] for m in result["matches"]] for result in response.json()["results"]]
