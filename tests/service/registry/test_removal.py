"""Versions that nothing uses can be deleted; one that something uses cannot, and says by what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from index.isolated import verify_isolated
from index.version import Version
from service.registry.registry import Registry
from service.settings import Settings
from service.store.audit import ChangeContext
from service.store.database.connections import Database
from service.store.tables import audit, edge, version
from service.upgrades.removal import remove
from staging.api.served import problem, serving
from staging.inputs.builders import make_version


@pytest.fixture
def spare(served: Any, versions: dict[str, Version], tmp_path: Path) -> Iterator[Version]:
    """A registered version, with an edge to v1, that nothing uses yet."""
    made = make_version(tmp_path / "spare", f"spare-{tmp_path.name}"[:60], 4, edges=[(versions["v1"], "identity")])
    assert served.register(made).status_code == 201
    yield made
    assert not [p for p in served.runtime.settings.versions.iterdir() if p.name.startswith(".")]


def rows(served: Any, name: str) -> tuple[list[str], list[int]]:
    """Registered names, and the numbers of edges from the version."""
    with served.runtime.database.lookup() as connection:
        names = list(connection.execute(select(version.c.name)).scalars())
        mine = select(edge.c.id).join(version, version.c.id == edge.c.new_id).where(version.c.name == name)
        return names, list(connection.execute(mine).scalars())


def test_a_version_that_nothing_uses_goes_with_its_edges_and_its_folder(served: Any, spare: Version) -> None:
    folder = served.runtime.settings.versions / spare.name
    added = {"new": spare.name, "old": "v1", "kind": "zero_pad"}
    assert served.http.post("/edges", json=added).status_code == 201
    path = f"/versions/{spare.name}"

    assert served.remove(path, dry_run=True).status_code == 204
    assert served.http.get(path).status_code == 200
    assert folder.is_dir()

    assert served.remove(path).status_code == 204
    problem(served.http.get(path), 404, "unknown_version")
    problem(served.remove(path), 404, "unknown_version")
    assert spare.name not in [v["name"] for v in served.http.get("/versions").json()["versions"]]
    assert spare.name not in [e["new"] for e in served.http.get("/edges").json()["edges"]]
    assert rows(served, spare.name)[1] == []
    assert not folder.exists()
    with served.runtime.database.lookup() as connection:
        last = connection.execute(select(audit).order_by(audit.c.id.desc()).limit(1)).one()
    assert (last.action, last.subject, last.evidence["edges"]) == ("version_deleted", spare.name, 2)

    assert served.register(spare).status_code == 201  # the name is free again


def current(served: Any, name: str) -> str:
    return f"galleries {served.gallery(name).rpartition('/')[2]}"


def superseded(served: Any, name: str) -> str:
    path = served.gallery(name)
    served.deploy(path, "v2")
    return f"deployments in galleries {path.rpartition('/')[2]}"


def stored(served: Any, name: str) -> str:
    path = served.gallery(name)
    items = [{"id": "a", "embedding": [1, 0, 0, 0]}]
    assert served.http.post(f"{path}/items", json={"items": items}).status_code == 200
    return f"items of galleries {path.rpartition('/')[2]}"


def gated(served: Any, name: str) -> str:
    """A gate leaves a report, and the evaluation set's embeddings."""
    path = served.gallery("v1")
    items = [{"id": str(n), "embedding": [n, 1, 0, 0], "metadata": {"label": n % 2}} for n in range(8)]
    assert served.http.post(f"{path}/items", json={"items": items}).status_code == 200
    entries, embeddings = [{"label": n % 2} for n in range(8)], {name: [[n, 1, 0, 0] for n in range(8)]}
    body = {"name": "e", "entries": entries, "embeddings": embeddings}
    made = served.http.post(f"{path}/evaluations", json=body)
    assert made.status_code == 201, made.text
    return "evaluation sets e"


def newer(served: Any, name: str) -> str:
    assert served.http.post("/edges", json={"new": "v2", "old": name, "kind": "truncate"}).status_code == 201
    return "edges from versions v2"


def moving(served: Any, name: str) -> str:
    made = served.http.post(f"{served.gallery(name)}/backfills", json={"kind": "reencode"})
    assert made.status_code in {201, 202}, made.text
    return f"backfills {made.json()['id']}"


@pytest.mark.parametrize("use", [current, superseded, stored, gated, newer, moving])
def test_what_uses_a_version_is_named(served: Any, spare: Version, use: Callable[[Any, str], str]) -> None:
    named = use(served, spare.name)
    before = rows(served, spare.name)

    for rehearsal in (True, False):
        refused = served.remove(f"/versions/{spare.name}", dry_run=rehearsal)
        assert named in problem(refused, 409, "version_needed")["detail"]

    assert before == rows(served, spare.name)
    assert (served.runtime.settings.versions / spare.name / "card.json").is_file()


def test_a_deletion_that_fails_at_its_commit_has_not_happened(
    served: Any, spare: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Database.write

    @contextmanager
    def failing(self: Database, **options: Any) -> Iterator[Any]:
        with real(self, **options) as connection:
            yield connection
            raise OSError("power cut")

    before = rows(served, spare.name)
    monkeypatch.setattr(Database, "write", failing)
    assert served.remove(f"/versions/{spare.name}").status_code == 500
    monkeypatch.undo()

    assert before == rows(served, spare.name)
    assert served.http.get(f"/versions/{spare.name}").json()["problem"] is None
    assert (served.runtime.settings.versions / spare.name / "card.json").is_file()
    assert served.remove(f"/versions/{spare.name}").status_code == 204


def test_a_version_whose_folder_is_gone_can_be_deleted(served: Any, spare: Version) -> None:
    (served.runtime.settings.versions / spare.name).rename(spare.folder.parent / "lost")

    assert served.remove(f"/versions/{spare.name}").status_code == 204


def test_another_process_forgets_it_without_being_asked(served: Any, spare: Version) -> None:
    with_edges = Settings(data=served.runtime.settings.data)
    other = Registry(served.runtime.database, with_edges)
    other.sync()
    assert other.named(spare.name)

    assert served.remove(f"/versions/{spare.name}").status_code == 204
    other.sync_edges()  # what a replica does each time it looks for news

    assert spare.name not in {registered.name for registered in other.all()}
    assert all(declared.edge.new != spare.name for declared in other.edges())


def test_so_it_does_a_version_without_edges(served: Any, tmp_path: Path) -> None:
    made = make_version(tmp_path / "v", "edgeless", 3, encoder=False)
    assert served.register(made).status_code == 201
    other = Registry(served.runtime.database, served.runtime.settings)
    other.sync()

    assert served.remove("/versions/edgeless").status_code == 204
    other.sync_edges()

    assert "edgeless" not in {registered.name for registered in other.all()}


def test_one_that_another_process_deleted_at_this_moment_is_refused_as_such(
    served: Any, spare: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, settings = served.gallery(None), served.runtime.settings
    with monkeypatch.context() as patch, closing(Database(settings.database_url)) as other:
        patch.setattr(served.runtime.registry, "sync", lambda: None)  # this process has not looked since
        remove(settings.versions, other, Registry(other, settings), spare.name, ChangeContext("other", dry_run=False))
        body = {"entries": [{}, {}], "embeddings": {spare.name: [[1, 0, 0, 0]] * 2}}
        problem(served.http.post(f"{path}/evaluations", json=body), 409, "deleted_meanwhile")
    served.runtime.registry.sync()
    problem(served.http.post(f"{path}/evaluations", json=body), 404, "unknown_version")


def test_one_whose_name_another_got_is_not_the_end_of_an_edge_that_was_verified_with_it(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (make_version(tmp_path / str(n), "taken", 4, seed=n) for n in (1, 2))
    newer = make_version(tmp_path / "newer", "newer", 4, edges=[(first, "identity")])
    assert served.register(first).status_code == 201

    def verify(*args: Any) -> None:
        monkeypatch.undo()
        verify_isolated(*args)
        assert served.remove("/versions/taken").status_code == 204
        assert served.register(second).status_code == 201

    monkeypatch.setattr("service.http.upgrades.versions.verify_isolated", verify)
    problem(served.register(newer), 409, "deleted_meanwhile")
    problem(served.http.get("/versions/newer"), 404, "unknown_version")
    assert served.remove("/versions/taken").status_code == 204


def test_one_that_another_process_deleted_is_not_shown(tmp_path: Path, versions: dict[str, Version]) -> None:
    settings = Settings(data=tmp_path, poll_seconds=60)
    with serving(settings) as served, closing(Database(settings.database_url)) as other:
        assert served.register(versions["plain"]).status_code == 201
        remove(settings.versions, other, Registry(other, settings), "plain", ChangeContext("other", dry_run=False))

        problem(served.http.get("/versions/plain"), 404, "unknown_version")
