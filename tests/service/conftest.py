"""A real server on a free port, real requests, and the versions and galleries the tests speak about."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from sqlalchemy import update

from index import isolated
from index.archive import pack_version
from index.version import Version
from service.http.app import create_app
from service.runtime import Runtime
from service.settings import Settings
from service.store.tables import backfill

names = (f"g{number}" for number in itertools.count())


@dataclass
class Served:
    """A running server: `http` speaks to it, `runtime` is its inside."""

    http: httpx.Client
    runtime: Runtime

    def remove(self, path: str, **params: Any) -> Any:
        """Delete what is more than an item."""
        return self.http.delete(path, params={"confirm": path.rpartition("/")[2], **params})

    def gallery(self, version: str | None = "v1") -> str:
        """A new gallery with `version` deployed; returns its path."""
        path = f"/galleries/{next(names)}"
        assert self.http.post("/galleries", json={"name": path.rpartition("/")[2]}).status_code == 201
        if version:
            deployed = self.http.post(f"{path}/deployments", json={"version": version})
            assert deployed.status_code == 201, deployed.text
        return path

    def cancel_backfills(self) -> None:
        """End what runs, behind the routes' back."""
        with self.runtime.database.write() as connection:
            connection.execute(update(backfill).where(backfill.c.state == "running").values(state="cancelled"))

    def ingest(self, path: str, images: dict[str, bytes], **metadata: Any) -> httpx.Response:
        """Store images by id."""
        items = [{"id": i, "metadata": metadata, "image": f"{n}.png"} for n, i in enumerate(images)]
        return self.post_items(path, items, [(f"{n}.png", image) for n, image in enumerate(images.values())])

    def post_items(self, path: str, items: Any, files: Sequence[tuple[str, bytes]], **params: Any) -> httpx.Response:
        """A multipart ingest, word by word."""
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
        return self.http.post("/versions", files={"archive": ("v.zip", zipped(version.folder))})


@contextmanager
def serve_in_thread(settings: Settings, **headers: str) -> Iterator[Served]:
    """Serve in a thread on a free port."""
    app = create_app(settings)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", headers=headers, timeout=30) as http:
            yield Served(http, app.state.runtime)
    finally:
        server.should_exit = True
        thread.join()


def zipped(folder: Path) -> bytes:
    """A version folder as the bytes of its archive."""
    archive = folder.parent / f"{folder.name}.zip"
    pack_version(folder, archive)
    return archive.read_bytes()


def check_problem(response: httpx.Response, status: int, code: str, pointer: str | None = None) -> dict[str, Any]:
    """Assert that a response is the expected problem+json, and return it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["status"] == status
    assert problem["code"] == code, problem
    assert problem["detail"]
    assert problem["title"]
    assert problem["type"].endswith(code)
    assert problem["request_id"] == response.headers["x-request-id"]
    if pointer is not None:
        assert pointer in [error["pointer"] for error in problem["errors"]], problem
    return problem


@pytest.fixture(scope="session", autouse=True)
def _verified_here() -> Iterator[None]:
    """Versions are verified in this process: another one takes a second each time, and has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolated, "_ask", lambda asked, limits: isolated._verify(json.loads(json.dumps(asked))))
        yield


@pytest.fixture(scope="session")
def serving() -> Callable[..., Any]:
    """The function `serve_in_thread`."""
    return serve_in_thread


@pytest.fixture(scope="session")
def problem() -> Callable[..., dict[str, Any]]:
    """The function `check_problem`."""
    return check_problem


@pytest.fixture(scope="session")
def zip_version() -> Callable[[Path], bytes]:
    """The function `zipped`."""
    return zipped


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory, make_version: Callable[..., Version]) -> dict[str, Version]:
    """v1 (dim 4), v2 truncating to it (dim 6), and `plain`, which takes embeddings only and has no edges."""
    root = tmp_path_factory.mktemp("versions")
    v1 = make_version(root / "v1", "v1", 4)
    v2 = make_version(root / "v2", "v2", 6, edges=[(v1, "truncate")])
    plain = make_version(root / "plain", "plain", 3, space={"kind": "l2"}, encoder=False)
    return {version.name: version for version in (v1, v2, plain)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Version]) -> Iterator[Served]:
    """One server for the tests of a file, with every version registered; each test makes its own gallery."""
    settings = Settings(data=tmp_path_factory.mktemp("data"), max_batch=100, max_body_bytes=1 << 20)
    with serve_in_thread(settings) as running:
        for version in versions.values():
            assert running.register(version).status_code == 201
        yield running


@pytest.fixture(scope="session")
def pictures(make_image: Callable[..., Any], image_bytes: Callable[..., bytes]) -> list[bytes]:
    """Twenty PNG files of five classes: number n is of class n % 5."""
    return [image_bytes(make_image(number % 5, number)) for number in range(20)]


@pytest.fixture
def alone(served: Any) -> Iterator[None]:
    """What a test leaves running must not occupy the workers of the next."""
    yield
    served.cancel_backfills()


@pytest.fixture
def keyed_alone(keyed: Any) -> Iterator[None]:
    """What a test leaves running must not occupy the workers of the next."""
    yield
    keyed.cancel_backfills()
