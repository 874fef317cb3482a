"""Freeing a retired version: each block once, again after a failure, and without keeping a process from starting."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.exc import OperationalError

from index.version import Version
from service.settings import Settings
from service.store.rows import EMPTIED
from service.store.sql.arrays import key_range
from service.store.tables import deployment, embedding, gallery, item
from service.upgrades.deployments import reaper as freeing
from staging.api.served import serving
from staging.waiting import until


@pytest.fixture
def moved(served: Any, pictures: list[bytes]) -> str:
    """Twenty items that hold v1, active in v2, which is current."""
    path = served.filled(pictures)
    move(served, path)
    return path


def move(served: Any, path: str) -> None:
    served.deploy(path, "v2")
    assert served.http.post(f"{path}/backfills", json={}).status_code == 202
    served.work()


def retire(served: Any, path: str, **options: Any) -> Any:
    return served.http.post(f"{path}/retire", json={"version": "v1"}, **options)


def left(served: Any, path: str) -> tuple[int, list[int | None]]:
    """Embeddings of v1 in the gallery, and what its deployments have to free."""
    mine = gallery.c.name == path.rpartition("/")[2]
    v1 = served.runtime.registry.named("v1").id
    held = (
        select(func.count()).select_from(embedding.join(item).join(gallery)).where(mine, embedding.c.version_id == v1)
    )
    joined = deployment.join(gallery, deployment.c.gallery_id == gallery.c.id)
    rest = select(deployment.c.to_free).select_from(joined).where(mine).order_by(deployment.c.id)
    with served.runtime.database.lookup() as connection:
        return connection.execute(held).scalar_one(), list(connection.execute(rest).scalars())


def test_what_another_gallery_freed_at_once_says_nothing_of_this_one(served: Any, moved: str) -> None:
    """As on PostgreSQL, where a retirement may empty its partition and leave it to the reaper to tell replicas."""
    other = served.gallery("v1").rpartition("/")[2]
    its = deployment.c.gallery_id == select(gallery.c.id).where(gallery.c.name == other).scalar_subquery()
    with served.runtime.database.write() as connection:
        connection.execute(update(deployment).where(its).values(to_free=EMPTIED))

    assert retire(served, moved).json()["embeddings"] == 20

    assert left(served, moved) == (0, [None, None])
    with served.runtime.database.write() as connection:
        connection.execute(update(deployment).where(its).values(to_free=None))


def locked(*_: Any, **__: Any) -> Any:
    raise OperationalError("DELETE", None, Exception("database is locked"))


def test_every_item_is_looked_at_once_however_many_blocks_there_are(
    served: Any, moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], bool, list[int | None]]] = []
    free_block = freeing._free_block

    def watched(connection: Any, *about: Any, last: bool) -> bool:
        seen.append((list(about[-1]), last, left(served, moved)[1]))
        return free_block(connection, *about, last=last)

    ranges = []

    def watched_range(*about: Any) -> Any:
        ranges.append(key_range(*about))
        return ranges[-1]

    monkeypatch.setattr(freeing, "BLOCK", 6)
    monkeypatch.setattr(freeing, "_free_block", watched)
    monkeypatch.setattr(freeing, "key_range", watched_range)

    assert retire(served, moved).json()["embeddings"] == 20
    assert [len(keys) for keys in ranges] == [6, 6, 6, 2, 0]

    assert [len(keys) for keys, _, _ in seen] == [6, 6, 6, 2]
    keys = [key for block, _, _ in seen for key in block]
    assert keys == sorted(set(keys))
    assert [last for _, last, _ in seen] == [False, False, False, True]
    assert [to_free for _, _, to_free in seen] == [[20, None], [14, None], [8, None], [2, None]]
    assert left(served, moved) == (0, [None, None])
    mine = gallery.c.name == moved.rpartition("/")[2]
    with served.runtime.database.lookup() as connection:
        numbers = sorted(connection.execute(select(item.c.seq).join(gallery).where(mine)).scalars())
        following = connection.execute(select(gallery.c.next_seq).where(mine)).scalar_one()
    assert numbers == [*range(following - 20, following)]


def test_what_failed_is_gone_on_with_by_itself(served: Any, moved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free_block, failures = freeing._free_block, iter(range(2))

    def failing_twice(*args: Any, **options: Any) -> bool:
        if args[3] and next(failures, None) is not None:
            locked()
        return free_block(*args, **options)

    monkeypatch.setattr(freeing, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(freeing, "_free_block", failing_twice)

    assert retire(served, moved).status_code == 503

    until(lambda: left(served, moved) == (0, [None, None]))
    shown = served.http.get(f"{moved}/deployments").json()["deployments"]
    assert [one["state"] for one in shown] == ["retired", "current"]


def test_a_version_that_was_deployed_again_keeps_what_was_not_freed_yet(
    served: Any, moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(freeing, "free", lambda *_: None)  # as a process that is killed
        assert retire(served, moved).status_code == 200
    served.deploy(moved, "v1")
    served.deploy(moved, "v2")
    here = served.runtime.replica.find(moved.rpartition("/")[2])

    freeing.free(served.runtime.database, served.runtime.registry, here.id, served.runtime.registry.named("v1").id)

    assert left(served, moved) == (20, [None] * 4)
    assert served.http.post(f"{moved}/rollback", json={}).status_code == 201


def test_what_serves_again_since_another_version_was_deployed_is_kept(
    served: Any, moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(freeing, "free", lambda *_: None)  # as a process that is killed
        assert retire(served, moved).status_code == 200
    served.add("beside", 4, edges=[("v1", "identity")])  # it reaches what v1 embedded, and nothing of v2
    served.deploy(moved, "beside")
    here = served.runtime.replica.find(moved.rpartition("/")[2])

    freeing.free(served.runtime.database, served.runtime.registry, here.id, served.runtime.registry.named("v1").id)

    assert left(served, moved) == (20, [None] * 3)
    assert served.http.get(moved).json()["mix"] == {"v1": 20}


def test_asked_again_it_goes_on_with_the_retirement_under_way(
    served: Any, moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(freeing, "free", lambda *_: None)  # as a process that is killed
        first = retire(served, moved)
    assert left(served, moved) == (20, [20, None])

    assert retire(served, moved, params={"dry_run": "true"}).json() == first.json()
    again = retire(served, moved)

    assert (again.status_code, again.json()) == (200, first.json())
    assert left(served, moved) == (0, [None, None])
    assert len(served.http.get(f"{moved}/deployments").json()["deployments"]) == 2
    assert retire(served, moved).json()["code"] == "nothing_to_retire"


def test_a_process_that_starts_answers_while_it_frees_what_another_left(
    tmp_path: Path, versions: dict[str, Version], pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data=tmp_path)
    with serving(settings) as running:
        for name in ("v1", "v2"):
            assert running.register(versions[name]).status_code == 201
        path = running.gallery("v1")
        running.ingest(path, {"i": pictures[0]})
        move(running, path)
        retired = update(deployment).where(deployment.c.state == "superseded").values(state="retired", to_free=1)
        with running.runtime.database.write() as connection:
            connection.execute(retired)
    begun, may_go_on = threading.Event(), threading.Event()
    free_block = freeing._free_block

    def held_up(*args: Any, **options: Any) -> bool:
        begun.set()
        may_go_on.wait(60)
        return free_block(*args, **options)

    monkeypatch.setattr(freeing, "_free_block", held_up)

    with serving(settings) as running:  # begins when the server has started
        assert begun.wait(60)
        assert running.http.get("/health").status_code == 200
        assert not may_go_on.is_set()
        assert left(running, path) == (1, [1, None])
        may_go_on.set()
        until(lambda: left(running, path) == (0, [None, None]))
