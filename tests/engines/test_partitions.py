"""Embeddings in PostgreSQL's partitions: converted, made, filled by older programs, settled, emptied and dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alembic import command
from sqlalchemy import Connection, QueuePool, event, insert, text

from service.errors import DeletedMeanwhile
from service.settings import Settings
from service.store import partitions
from service.store.database import Database
from service.store.embeddings import put_embeddings, vectors_of
from service.store.migration import migrating, upgrade
from service.store.repository import NewItem, changes, insert_gallery, store_items, take_seq
from service.store.tables import version
from service.upgrades.deployments import reaper
from staging.builders import make_version
from staging.served import Served, serving
from staging.together import together
from staging.waiting import until

pytestmark = pytest.mark.parametrize("engine", ["postgresql"], indirect=True)

PLACES = "select tableoid::regclass::text, item_id, gallery_id, version_id from embedding order by item_id, version_id"
OLDER = "insert into embedding (item_id, version_id, origin, vector) values (:item, :version, 'encoded', :vector)"
"""How a program of the release before 0020 stores an embedding."""


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    """With the versions 1 and 2 and the galleries 1 and 2, whose items 1, 3 and 2, 4 hold an embedding of version 1."""
    upgrade(settings)
    with closing(Database(settings.database_url)) as opened:
        with opened.write() as connection:
            for name in ("v1", "v2"):
                connection.execute(insert(version).values(name=name, card={}, card_sha256="", created=1.5))
            galleries = [insert_gallery(connection, name) for name in ("g", "h")]
        for gallery_id in galleries:
            partitions.make(opened, gallery_id, 1)
        for name in ("a", "b"):
            for gallery_id in galleries:
                with opened.write() as connection:
                    store(connection, gallery_id, name)
        yield opened


def store(connection: Connection, gallery_id: int, *names: str) -> None:
    new = [NewItem(name, {}, "supplied", np.eye(1, 4, dtype=np.float32)[0]) for name in names]
    store_items(connection, gallery_id, 1, new, take_seq(connection, gallery_id, len(new)))


def places(database: Database) -> list[Any]:
    """The partition, the item, the gallery and the version of each embedding."""
    with database.lookup() as connection:
        return [tuple(row) for row in connection.execute(text(PLACES))]


def older(connection: Connection, item: int, version_id: int) -> None:
    connection.execute(text(OLDER), {"item": item, "version": version_id, "vector": b"12345678"})


@contextmanager
def held(database: Database, statement: str) -> Iterator[None]:
    """Somebody in a transaction that has run a statement."""
    with database.write() as connection:
        connection.execute(text(statement))
        yield


START = [("embedding_1_1", 1, 1, 1), ("embedding_2_1", 2, 2, 1), ("embedding_1_1", 3, 1, 1), ("embedding_2_1", 4, 2, 1)]


def test_a_filled_database_is_converted_and_back_with_nothing_lost(database: Database, settings: Settings) -> None:
    whole = "select item_id, version_id, origin, vector, side, uncertainty, digest from embedding order by item_id"
    with database.write() as connection:
        older(connection, 3, 2)
        before = connection.execute(text(whole)).all()
    for revision in ("0019", "0020"):
        with migrating(settings.database_url) as config:
            (command.downgrade if revision == "0019" else command.upgrade)(config, revision)
        with database.lookup() as connection:
            assert sorted(connection.execute(text(whole)).all()) == sorted(before)

    assert places(database) == [*START[:3], ("embedding_1_2", 3, 1, 2), START[3]]
    with pytest.raises(DeletedMeanwhile), database.write() as connection:
        older(connection, 99, 1)


MANY_0019 = """
insert into version (name, card, card_sha256, created) values ('v1', '{}', '', 0);
insert into gallery (name, current_id, next_seq, created) select 'g' || n, 1, 2, 0 from generate_series(1, 210) n;
insert into item (gallery_id, external_id, metadata, seq, deleted, created)
    select gallery.id, cast(n as text), '{}', 1, false, 0
    from gallery, generate_series(1, case when gallery.id > 200 then 2 else 1 end) n;
insert into embedding (item_id, version_id, origin, vector) select id, 1, 'supplied', 'abcd' from item
"""
"""210 galleries, the last ten of which hold two embeddings."""


def test_more_places_than_one_transaction_can_lock_are_converted_largest_first(unmigrated: Settings) -> None:
    with migrating(unmigrated.database_url) as config:
        command.upgrade(config, "0019")
    with closing(Database(unmigrated.database_url)) as opened:
        with opened.write() as connection:
            connection.execute(text(MANY_0019))
        upgrade(unmigrated)
        unsettled = [gallery for partition, _, gallery, _ in places(opened) if partition == "embedding_default"]
        assert len(places(opened)) == 220
        assert sorted(unsettled) == list(range(191, 201))

        stopped = threading.Event()
        stopped.set()
        assert not partitions.settle(opened, stopped)
        assert partitions.settle(opened)
        assert {f"embedding_{gallery}_1" for _, _, gallery, _ in places(opened)} == {row[0] for row in places(opened)}


def test_what_an_older_program_stores_is_found_and_settles(database: Database) -> None:
    with database.write() as connection:
        connection.execute(text("delete from embedding where item_id = 3"))
        for item, version_id in ((3, 1), (1, 2), (3, 2), (2, 2)):
            older(connection, item, version_id)

    unsettled = {(1, 2), (3, 2), (2, 2)}
    assert {row[1::2] for row in places(database) if row[0] == "embedding_default"} == unsettled
    with database.read() as connection:
        assert sorted(vectors_of(connection, 1, [3])[3]) == [1, 2]
        seen = next(iter(changes(connection, 1, 0)))[-1][6]
    assert partitions.settle(database)
    assert {row[0] for row in places(database) if row[3] == 2} == {"embedding_1_2", "embedding_2_2"}
    with database.read() as connection:  # a reader that began before may have missed them: they are told of again
        told = {row[0] for block in changes(connection, 1, seen) for row in block}
    assert told == {1, 3}


def test_an_embedding_is_stored_though_no_partition_can_be_made(database: Database) -> None:
    with held(database, "lock table item in row exclusive mode"):
        partitions.make(database, 1, 2)
        with database.write() as connection:
            take_seq(connection, 1, 0)
            put_embeddings(connection, 1, 2, "encoded", [1], np.ones((1, 2), np.float32))

    assert ("embedding_default", 1, 1, 2) in places(database)
    assert partitions.settle(database)
    assert ("embedding_1_2", 1, 1, 2) in places(database)


def test_nothing_is_copied_while_it_cannot_be_attached(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Any] = []
    with database.write() as connection:
        older(connection, 1, 2)
    with monkeypatch.context() as patch, held(database, "lock table item in row exclusive mode"):
        patch.setattr(partitions, "LOCK_SECONDS", 0.05)
        patch.setattr(partitions, "PAUSE_SECONDS", 0.01)
        patch.setattr(partitions, "_make_beside", lambda *place: copied.append(place))
        assert not partitions.settle(database)

    assert copied == []
    assert partitions.settle(database)
    assert ("embedding_1_2", 1, 1, 2) in places(database)


def test_an_embedding_is_stored_though_another_comes_before_its_partition_is_attached(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(item_id: int) -> None:
        with database.write() as connection:
            take_seq(connection, 1, 0)
            put_embeddings(connection, 1, 2, "encoded", [item_id], np.ones((1, 2), np.float32))

    make_beside = partitions._make_beside

    def make_while_another_stores(*arguments: Any) -> str:
        put(3)
        return make_beside(*arguments)

    monkeypatch.setattr(partitions, "_make_beside", make_while_another_stores)
    partitions.make(database, 1, 2)
    put(1)
    monkeypatch.undo()

    assert {row[:2] for row in places(database) if row[3] == 2} == {("embedding_default", 1), ("embedding_default", 3)}
    assert partitions.settle(database)
    assert {row[:2] for row in places(database) if row[3] == 2} == {("embedding_1_2", 1), ("embedding_1_2", 3)}


def test_those_who_make_one_partition_at_once_make_it_once(database: Database) -> None:
    def put(number: int) -> None:
        partitions.make(database, 1, 2)
        with database.write() as connection:
            take_seq(connection, 1, 0)
            put_embeddings(connection, 1, 2, "encoded", [1 + 2 * (number % 2)], np.ones((1, 2), np.float32))

    together(4, put)
    partitions.settle(database)

    assert [row for row in places(database) if row[3] == 2] == [("embedding_1_2", n, 1, 2) for n in (1, 3)]


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


def names(database: Database) -> set[str]:
    """Of the partitions."""
    mine = "select inhrelid::regclass::text from pg_inherits where inhparent = 'embedding'::regclass"
    with database.lookup() as connection:
        return set(connection.execute(text(mine)).scalars())


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


def test_a_partition_that_holds_rows_is_not_dropped_and_is_emptied_at_once(database: Database) -> None:
    timeout = text("show lock_timeout")
    partitions.drop(database, 1, 1)
    assert places(database) == START
    with database.write() as connection:
        before = connection.execute(timeout).scalar_one()
        assert partitions.empty(connection, 1, 1)
        assert connection.execute(timeout).scalar_one() == before
    for gallery_id in (1, 9):  # of the second there is none any more
        partitions.drop(database, gallery_id, 1)
    assert names(database) == {"embedding_default", "embedding_2_1"}


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
