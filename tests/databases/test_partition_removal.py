"""Versions and galleries leave their partitions while others read and write; each query looks into its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import QueuePool, event, text

from service.settings import Settings
from service.store.database.connections import Database
from service.store.galleries import partitions
from service.store.galleries.embeddings import vectors_of
from service.upgrades.deployments import reaper
from staging.api.served import Served, serving
from staging.inputs.builders import make_version
from staging.states.partition_rows import held, names, places, store
from staging.waiting import until

pytestmark = pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)


@pytest.fixture
def served(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Ten items of gallery `g` hold v1 and v2, which is current; those of `h` hold v1."""
    monkeypatch.setattr(partitions, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(partitions, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(reaper, "BLOCK", 4)
    v1 = make_version(tmp_path / "v1", "v1", 4)
    with serving(settings) as running:
        for one in (v1, make_version(tmp_path / "v2", "v2", 6, edges=[(v1, "truncate")])):
            assert running.register(one).status_code == 201
        for name in ("g", "h"):
            running.http.post("/galleries", json={"name": name})
            running.deploy(f"/galleries/{name}", "v1")
            add(running, name, "v1", 4)
        running.deploy("/galleries/g", "v2")
        add(running, "g", "v2", 6)
        yield running


def add(served: Served, name: str, version_name: str, dim: int) -> None:
    items = [{"id": f"i{n}", "embedding": np.eye(dim)[n % dim].tolist()} for n in range(10)]
    answer = served.http.post(f"/galleries/{name}/items", json={"version": version_name, "items": items})
    assert answer.json()["stored"] == 10, answer.text


def retire(served: Served, **options: Any) -> None:
    answer = served.http.post("/galleries/g/retire", json={"version": "v1"}, **options)
    assert answer.status_code == 200, answer.text
    assert answer.json()["embeddings"] == 10


def known(served: Served) -> dict[str, int]:
    """Items of `g` in memory, by the older of the versions they hold."""
    return served.runtime.replica.find("g").gallery.items_by_version(["v1", "v2"])


def unfinished(database: Database) -> list[int]:
    with database.lookup() as connection:
        return list(connection.execute(text("select to_free from deployment where to_free is not null")).scalars())


WHOLE = {"embedding_default", "embedding_1_1", "embedding_1_2", "embedding_2_1"}


@pytest.mark.parametrize(
    ("reads", "left"),
    [
        (None, WHOLE - {"embedding_1_1"}),
        ("select count(*) from embedding where gallery_id = 2 and version_id = 1", WHOLE),
        ("select count(*) from embedding", WHOLE),
    ],
)
def test_a_retired_version_goes_at_once_or_block_by_block_where_somebody_reads_it(
    served: Served, reads: str | None, left: set[str]
) -> None:
    database = served.runtime.database
    assert names(database) == WHOLE
    retire(served, params={"dry_run": True})
    assert len(places(database)) == 30
    with held(database, reads) if reads else nullcontext():
        retire(served)

    assert {row[0] for row in places(database)} == {"embedding_1_2", "embedding_2_1"}
    assert (names(database), unfinished(database)) == (left, [])
    assert known(served) == {"v2": 10}
    reaper.drop_empty_partitions(database)  # as every half a minute
    assert names(database) == WHOLE - {"embedding_1_1"}
    partitions.make(database, 1, 1)
    reaper.drop_empty_partitions(database)
    add(served, "g", "v1", 4)  # the same embeddings again
    reaper.drop_empty_partitions(database)
    assert partitions.settle(database)
    assert names(database) == WHOLE


def test_replicas_hear_of_a_retirement_that_was_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    tell_block, told = reaper._announce_block, []

    def once(*arguments: Any) -> int | None:
        told.append(arguments)
        if len(told) == 2:
            raise RuntimeError
        return tell_block(*arguments)

    monkeypatch.setattr(reaper, "_announce_block", once)
    monkeypatch.setattr(reaper, "RETRY_SECONDS", 0.01)
    served.http.post("/galleries/g/retire", json={"version": "v1"})

    until(lambda: not unfinished(served.runtime.database))
    served.runtime.replica.refresh(1)
    assert known(served) == {"v2": 10}


def tells_at_once(connection: Any, _: object) -> None:
    """Have the server know what a session did when it is put back, and not a second later."""
    connection.execute("select pg_stat_force_next_flush()")
    connection.rollback()


def scans(database: Database) -> int:
    """How often something looked into the partitions of `h`."""
    looked = "select sum(seq_scan + coalesce(idx_scan, 0)) from pg_stat_all_tables where relname like 'embedding_2_%'"
    with database.lookup() as connection:
        connection.execute(text("select pg_stat_clear_snapshot()"))
        return int(connection.execute(text(looked)).scalar_one())


def test_what_is_asked_of_one_gallery_looks_into_no_partition_of_another(served: Served) -> None:
    http, database, pair = served.http, served.runtime.database, {"new": "v2", "old": "v1"}
    for engine in (database._writer, database._reader, database._finder):
        pool = engine.pool
        assert isinstance(pool, QueuePool)
        event.listen(engine, "checkin", tells_at_once)
        used = [engine.connect() for _ in range(pool.checkedin())]  # what they did before is told of now
        for connection in used:
            connection.close()
    embedded, supplied = {"version": "v2", "embeddings": [[0] * 5 + [1]]}, {"kind": "supplied"}
    beside = {"version": "v2", "items": [{"id": "i1", "embedding": [1] + [0] * 5}]}
    asked: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("POST", "/galleries/g/query", embedded, {}),
        ("POST", "/galleries/g/query", {"items": ["i1"]}, {}),
        ("GET", "/galleries/g/items/i1", {}, {}),
        ("GET", "/galleries/g/items", {}, {}),
        ("GET", "/galleries/g/items:embeddings", {}, {}),
        ("GET", "/galleries/g/items:missing", {}, {"version": "v1"}),
        ("PUT", "/galleries/g/items:embeddings", beside, {}),
        ("POST", "/galleries/g/gates", {"version": "v1"}, {}),
        ("POST", "/edges:fit", {**pair, "kind": "ridge", "gallery": "g"}, {}),
        *(("POST", "/galleries/g/backfills", {"kind": kind}, {"dry_run": True}) for kind in ("reencode", "supplied")),
        ("POST", "/galleries/g/backfills", {"kind": "reencode"}, {}),
        ("POST", "/galleries/g/backfills", supplied, {}),
        ("DELETE", "/galleries/g/items/i2", {}, {}),
        ("POST", "/galleries/g/deployments", {"version": "v1"}, {}),
        ("POST", "/galleries/g/rollback", {}, {}),
        ("POST", "/galleries/g/retire", {"version": "v1"}, {}),
        ("DELETE", "/galleries/g", {}, {"confirm": "g"}),
    ]
    looked = {}
    for method, path, body, params in asked:
        before = scans(database)
        answer = http.request(method, path, params=params, **({"json": body} if body else {}))
        # Ten pairs are too few for a fit, which it knows when it has looked for them.
        assert answer.is_success or answer.json()["code"] == "too_few_pairs", answer.text
        looked[method, path, str(body), str(params)] = scans(database) - before

    assert {about: times for about, times in looked.items() if times} == {}


def test_others_read_and_write_while_a_version_and_a_gallery_go(served: Served) -> None:
    database, over, failed, counts = served.runtime.database, threading.Event(), [], [0, 0]

    def work(number: int, one: Callable[[], None]) -> None:
        try:
            while not over.is_set():
                one()
                counts[number] += 1
        except Exception as error:
            failed.append(error)

    def store_one() -> None:
        with database.write() as connection:
            store(connection, 2, f"w{counts[0]}")

    def read_all() -> None:
        with database.read() as connection:
            assert len(vectors_of(connection, 2, [11, 12])[11]) == 1

    threads = [threading.Thread(target=work, args=some) for some in ((0, store_one), (1, read_all))]
    for thread in threads:
        thread.start()
    try:
        retire(served)
        assert served.http.delete("/galleries/g", params={"confirm": "g"}).status_code == 204
        until(lambda: names(database) == {"embedding_default", "embedding_2_1"}, seconds=10)
    finally:
        over.set()
        for thread in threads:
            thread.join()

    assert failed == []
    assert min(counts) > 3
