"""`dry_run=true` on everything: every change can be rehearsed, and a rehearsal leaves nothing behind."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from sqlalchemy import select

from index.version import Version
from regraft.cli import app as commands
from service.http.app import create_app
from service.settings import Settings
from service.store.tables import metadata
from staging.api.served import Served, serving
from staging.inputs.builders import make_version

WITHOUT = {
    "POST /v1/edges:check": "changes nothing",
    "POST /v1/galleries/{name}/query": "changes nothing",
    "POST /v1/galleries/{name}/items:list": "changes nothing",
    "POST /v1/galleries": "makes an empty gallery, and nothing else",
    "POST /v1/keys": "makes a key that nobody has yet, and nothing else",
    "POST /v1/galleries/{name}/items": "a user's write, not an administrator's; every fault is told by item",
    "PUT /v1/galleries/{name}/items:embeddings": "a user's write, as above",
    "DELETE /v1/galleries/{name}/items/{item_id}": "a user's write",
    "POST /v1/work:claim": "a worker's protocol: a lease ends by itself",
    "POST /v1/work/{chunk}": "a worker's protocol: checked before anything is written",
    "POST /v1/work/{chunk}/extend": "a worker's protocol",
    "POST /v1/work/{chunk}/release": "a worker's protocol",
}
"""Routes that are no GET and cannot be rehearsed, and why."""

READING = {"check", "list", "show", "watch", "estimate", "verify", "pack", "create", "export"}
"""Subcommands that change nothing at the service; `create` makes an empty gallery."""
ALONE = {"gate", "deploy", "rollback", "retire"}
"""Commands of the same family without subcommands."""


def test_every_route_that_changes_something_can_be_rehearsed_or_says_why_not() -> None:
    spoken = create_app(Settings()).openapi()["paths"]
    changing = {
        f"{method.upper()} {path}": {p["name"] for p in operation.get("parameters", []) if p["in"] == "query"}
        for path, operations in spoken.items()
        for method, operation in operations.items()
        if method != "get"
    }

    assert {route for route, parameters in changing.items() if "dry_run" not in parameters} == set(WITHOUT)
    assert len(changing) - len(WITHOUT) >= 16


def test_every_command_of_an_upgrade_that_changes_something_can_be_rehearsed() -> None:
    found: Mapping[str, Any] = typer.main.get_group(commands).commands
    groups = {"version", "evaluation", "edge", "deployment", "backfill", "gallery"}
    changing = {
        f"{group} {name}": command
        for group in groups
        for name, command in found[group].commands.items()
        if name not in READING
    } | {name: found[name] for name in ALONE}

    without = [name for name, command in changing.items() if "dry_run" not in {p.name for p in command.params}]
    assert without == []
    assert len(changing) >= 14


@dataclass(kw_only=True)
class Rehearsed(Served):
    """A server, a version that it does not have yet, and the archive of another edge."""

    late: Version
    edge: bytes


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Version]) -> Iterator[Rehearsed]:
    root = tmp_path_factory.mktemp("rehearsed")
    v3 = make_version(root / "v3", "v3", 4, drift=0.1)
    forward = make_version(root / "f" / "v3", "v3", 4, drift=0.1, edges=[(versions["v1"], "forward")])
    same = make_version(root / "same", "same", 4)
    late = make_version(root / "late", "late", 5, seed=2)
    with serving(Settings(data=root / "data")) as running:
        for version in (versions["v1"], versions["v2"], v3, same):
            assert running.register(version).status_code == 201
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for path in (forward.folder / "edges" / "v1").iterdir():
                archive.write(path, path.name)
        yield Rehearsed(running.http, running.runtime, running.versions, late=late, edge=stream.getvalue())


@pytest.fixture(scope="module")
def filled(served: Any, pictures: list[bytes]) -> str:
    """A gallery whose items hold embeddings by v1 and v2, a paused backfill, and what the changes below speak of."""
    path: str = served.gallery("v1")
    images = {f"i{n}": picture for n, picture in enumerate(pictures)}
    images |= {f"j{n}": picture + b" " for n, picture in enumerate(pictures)}
    assert served.ingest(path, images, digit=1).status_code == 200
    served.http.post(f"{path}/deployments", json={"version": "v2"})
    served.http.post(f"{path}/backfills", json={})
    served.work()
    return path


def state(served: Any) -> str:
    """A hash of every row and every file."""
    told = hashlib.sha256()
    with served.runtime.database.read() as connection:
        for table in metadata.sorted_tables:
            rows = sorted(map(repr, connection.execute(select(table)).all()))
            told.update(f"{table.name}: {rows}\n".encode())
    data: Path = served.runtime.settings.data
    for path in sorted(p for p in data.rglob("*") if p.is_file() and not p.name.startswith("regraft.db")):
        told.update(f"{path.relative_to(data)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return told.hexdigest()


def audit(served: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = served.http.get("/audit").json()["audit"]
    return rows


Request = Callable[[Any, str, dict[str, str]], Any]


def send(method: str, place: str, body: Any = None) -> Request:
    def ask(served: Any, path: str, params: dict[str, str]) -> Any:
        with_body = {} if body is None else {"json": body}
        if method == "DELETE":
            return served.remove(place.format(g=path), **params)
        return served.http.request(method, place.format(g=path), params=params, **with_body)

    return ask


def register(served: Any, path: str, params: dict[str, str]) -> Any:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for file in sorted(p for p in served.late.folder.rglob("*") if p.is_file()):
            archive.write(file, file.relative_to(served.late.folder))
    return served.http.post("/versions", params=params, files={"archive": ("v.zip", stream.getvalue())})


def add_edge(served: Any, path: str, params: dict[str, str]) -> Any:
    data = {"new": "v3", "old": "v1", "replace": "true"}
    return served.http.post("/edges", params=params, data=data, files={"archive": ("e.zip", served.edge)})


def upload(served: Any, path: str, params: dict[str, str]) -> Any:
    body = {"name": "n", "entries": [{"label": 1}, {"label": 2}], "embeddings": {"v1": [[1, 0, 0, 0], [0, 1, 0, 0]]}}
    return served.http.post(f"{path}/evaluations", params=params, json=body)


def newest(what: str, then: str = "", method: str = "POST") -> Request:
    """A change of the newest backfill or evaluation set."""

    def ask(served: Any, path: str, params: dict[str, str]) -> Any:
        number = served.http.get(f"{path}/{what}").json()[what][-1]["id"]
        place = f"/{what}/{number}{then}" if what == "backfills" else f"{path}/{what}/{number}{then}"
        return served.remove(place, **params) if method == "DELETE" else served.http.post(place, params=params)

    return ask


REMOVED = {"force": "true", "reason": "drill"}

CHANGES: list[tuple[str, Request, int, str | None]] = [
    # In this order: the status when it is done, and how the audit calls it (None: it keeps a record of its own).
    ("register", register, 201, "version_registered"),
    ("add edge", add_edge, 201, "edge_added"),
    ("replace edge", add_edge, 201, "edge_added"),
    ("declare edge", send("POST", "/edges", {"new": "v3", "old": "v1", "kind": "zero_pad"}), 201, "edge_added"),
    ("claim edge", send("POST", "/edges", {"new": "same", "old": "v1", "kind": "identity"}), 201, "edge_claimed"),
    ("fit edge", send("POST", "/edges:fit", {"new": "v2", "old": "v1", "kind": "ridge"}), 201, "edge_fitted"),
    ("remove edge", lambda s, g, p: send("DELETE", "/edges/v3/v1/zero_pad")(s, g, p | REMOVED), 200, "edge_removed"),
    ("evaluation", upload, 201, "evaluation_added"),
    ("delete evaluation", newest("evaluations", method="DELETE"), 204, "evaluation_deleted"),
    ("rollback", send("POST", "{g}/rollback", {"reason": "drill"}), 201, None),
    ("gate", send("POST", "{g}/gates", {"version": "v2", "label": "digit"}), 201, None),
    ("deploy", send("POST", "{g}/deployments", {"version": "v3", "until": "registered"}), 201, None),
    ("deploy again", send("POST", "{g}/rollback"), 201, None),
    ("deploy v3", send("POST", "{g}/deployments", {"version": "v3"}), 201, None),
    ("backfill", send("POST", "{g}/backfills", {"kind": "reencode"}), 202, "backfill_started"),
    ("pause", newest("backfills", "/pause"), 200, "backfill_paused"),
    ("resume", newest("backfills", "/resume"), 200, "backfill_running"),
    ("cancel", newest("backfills", "/cancel"), 200, "backfill_cancelled"),
    ("back", send("POST", "{g}/rollback"), 201, None),
    ("retire", send("POST", "{g}/retire", {"version": "v2"}), 200, None),
    ("delete", send("DELETE", "{g}"), 204, "gallery_deleted"),
]


def test_a_rehearsal_answers_as_if_and_leaves_no_trace_and_the_change_itself_is_in_the_audit(
    served: Any, filled: str
) -> None:
    for name, ask, status, action in CHANGES:
        before, rows = state(served), audit(served)

        rehearsed = ask(served, filled, {"dry_run": "true"})
        assert rehearsed.status_code in {200, 204}, (name, rehearsed.text)
        assert state(served) == before, name

        done = ask(served, filled, {})
        assert done.status_code == status, (name, done.text)
        assert state(served) != before, name
        new = [row for row in audit(served) if row not in rows]
        assert [row["action"] for row in new] == ([] if action is None else [action]), name
        assert all(row["who"] == "local" for row in new)
    removed = next(row for row in audit(served) if row["action"] == "edge_removed")
    assert (removed["subject"], removed["why"], removed["evidence"]["forced"]) == ("v3/v1/zero_pad", "drill", True)


def test_a_rehearsal_is_refused_as_the_change_would_be(served: Any) -> None:
    dry = {"dry_run": "true"}
    archive = {"archive": ("v.zip", b"no zip")}
    assert served.http.post("/versions", params=dry, files=archive).json()["code"] == "invalid_version_folder"
    twice = {"new": "same", "old": "v1", "kind": "identity"}
    assert served.http.post("/edges", params=dry, json={**twice, "new": "v2"}).status_code == 422
    assert served.remove("/galleries/nobody", **dry).json()["code"] == "unknown_gallery"
    assert served.http.post("/backfills/999/pause", params=dry).status_code == 404


def test_the_audit_is_read_page_by_page(served: Any) -> None:
    for _ in range(3):
        served.gallery(None)
    rows = audit(served)
    assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), reverse=True)

    first = served.http.get("/audit", params={"limit": 2}).json()["audit"]
    second = served.http.get("/audit", params={"limit": 2, "before": first[-1]["id"]}).json()["audit"]

    assert [*first, *second] == rows[:4]
    assert json.dumps(rows[0]["evidence"]) == "{}"
