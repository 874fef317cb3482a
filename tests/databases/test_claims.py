"""Chunks and the change feed under real concurrency: several connections at once, on both databases."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sqlalchemy import insert, select

from service.backfills import chunks, leasing
from service.backfills.chunks import Chunk
from service.backfills.outcome import EmbeddedItems
from service.backfills.scores import NO_SCORES
from service.backfills.states import BackfillState, Kind
from service.backfills.sweeps import begin_next_sweep, continue_sweep, new_sweep_columns
from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.galleries.change_feed import changes
from service.store.galleries.gallery import lock_galleries, take_seq
from service.store.galleries.items import NewItem, delete_items, store_items
from service.store.galleries.snapshots import record_snapshot, snapshots_of
from service.store.leases.jobs import acquire_job
from service.store.rows import BackfillRow
from service.store.tables import backfill, backfill_chunk, embedding, gallery, item, version
from staging.together import together

V1, V2 = 1, 2
ORDER = (V2, V1)
ONE = np.ones(2, np.float32)


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    upgrade(settings)
    opened = Database(settings.database_url)
    with opened.write() as connection:
        for name in ("v1", "v2"):
            connection.execute(
                insert(version).values(name=name, card={"files": {"encoder.onnx": "0"}}, card_sha256=name, created=0.0)
            )
        connection.execute(insert(gallery).values(name="g", created=0.0, next_seq=1))
    yield opened
    opened.close()


def store(database: Database, ids: list[str]) -> int:
    with database.write() as connection:
        first = take_seq(connection, 1, len(ids))
        new = [NewItem(i, {}, "encoded", ONE, blob="b") for i in ids]
        store_items(connection, 1, V1, new, first)
    return first


def start(database: Database, **fields: Any) -> int:
    with database.write() as connection:
        row = {
            "gallery_id": 1,
            "version_id": V2,
            "kind": Kind.REENCODE,
            "item_order": "oldest",
            "state": BackfillState.RUNNING,
        }
        row |= {"chunk_size": 3, "next_claim": 0.0, "total": 0, "created": 0.0, **fields}
        row |= new_sweep_columns(take_seq(connection, 1, 0))
        made = BackfillRow(*connection.execute(insert(backfill).values(row).returning(backfill)).one())
    continue_sweep(database, made, ORDER, lambda: NO_SCORES)
    return made.id


def claim(database: Database, owner: str, lease: float = 60.0) -> Chunk | None:
    with database.write() as connection:
        return leasing.claim(connection, owner, lease)


def commit(database: Database, chunk: Chunk) -> dict[str, int]:
    with database.read() as connection:
        rows = chunks.read_contents(connection, chunk)
    with database.write() as connection:
        made = np.stack([2 * ONE] * len(rows))
        return chunks.commit(connection, chunk, [EmbeddedItems([r.id for r in rows], [r.seq for r in rows], made)], [])


def test_every_chunk_is_leased_once_however_many_claim_at_the_same_moment(database: Database) -> None:
    store(database, [f"i{n}" for n in range(90)])
    start(database)
    claimed: list[int] = []

    def work(number: int) -> None:
        while chunk := claim(database, f"w{number}"):
            claimed.append(chunk.id)

    together(4, work)

    assert len(claimed) == len(set(claimed)) == 30


def test_several_workers_move_every_item_once_in_commit_order(database: Database) -> None:
    store(database, [f"i{n}" for n in range(60)])
    number = start(database)
    counts: list[dict[str, int]] = []

    def work(worker: int) -> None:
        while chunk := claim(database, f"w{worker}"):
            counts.append(commit(database, chunk))

    together(4, work)

    assert sum(count["done"] for count in counts) == 60
    with database.write() as connection:
        job = begin_next_sweep(connection, number)
    assert job
    assert continue_sweep(database, job, ORDER, lambda: NO_SCORES) is BackfillState.DONE
    with database.lookup() as connection:
        row = connection.execute(select(backfill).where(backfill.c.id == number)).one()
        assert (row.done, row.skipped, row.failed, row.total) == (60, 0, 0, 60)
        seqs = list(
            connection.execute(select(item.c.seq).join(embedding).where(embedding.c.version_id == V2)).scalars()
        )
        assert sorted(seqs) == list(range(61, 121))
        assert len(connection.execute(select(embedding).where(embedding.c.version_id == V2)).all()) == 60


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)  # SQLite has one writer at a time anyway
def test_a_worker_in_the_middle_of_a_claim_holds_up_no_other(database: Database) -> None:
    store(database, [f"i{n}" for n in range(9)])
    start(database)

    with database.write() as connection:
        # The backfill's row is moved on at the end of a claim; what is measured here is that chunks are passed by.
        first = leasing._lease_next(connection, 1, "slow", 60.0)
        taken: list[Any] = []

        def others(_: int) -> None:
            with database.write() as other:
                taken.append(leasing._lease_next(other, 1, "quick", 60.0).id)

        together(1, others)
        together(1, others)

    assert first is not None
    assert len({first.id, *taken}) == 3


def test_an_item_whose_lease_ran_out_is_taken_over_by_one_worker_only(database: Database) -> None:
    store(database, ["i0", "i1"])
    start(database)
    lost = claim(database, "frozen", lease=-1.0)
    assert lost is not None
    taken: list[Chunk | None] = []

    together(4, lambda number: taken.append(claim(database, f"w{number}")))

    halves = [chunk for chunk in taken if chunk is not None]
    assert sorted(items for half in halves for items in half.item_ids) == sorted(lost.item_ids)
    with pytest.raises(chunks.ChunkLost):
        commit(database, lost)
    assert [commit(database, half)["done"] for half in halves] == [1, 1]


def test_a_lease_ends_by_the_clock_of_the_database(
    database: Database, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PostgreSQL processes run on machines whose clocks may differ; those that share a file of SQLite have one."""
    if dialect == "sqlite":
        pytest.skip("there is one clock")
    store(database, ["a", "b", "c"])
    start(database)
    clock = time.time
    with monkeypatch.context() as late:
        late.setattr(time, "time", lambda: clock() - 300.0)
        held = claim(database, "late")
    assert held is not None

    assert claim(database, "other") is None
    assert commit(database, held)["done"] == 3


def test_a_snapshot_is_new_by_the_clock_of_the_database(
    database: Database, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dialect == "sqlite":
        pytest.skip("there is one clock")
    store(database, ["a"])
    clock = time.time
    with database.write() as connection:
        record_snapshot(connection, 1, "older", 1)
        monkeypatch.setattr(time, "time", lambda: clock() - 300.0)
        record_snapshot(connection, 1, "newer", 1)
        assert snapshots_of(connection, 1) == ["newer", "older"]


def test_the_feed_is_in_commit_order_whoever_writes(database: Database) -> None:
    """A reader that asks for what is behind the last number it saw never misses a commit."""
    done = threading.Event()
    seen: list[tuple[int, int]] = []
    missed: list[int] = []

    def write(number: int) -> None:
        for turn in range(15):
            store(database, [f"w{number}-{turn}-{n}" for n in range(1 + turn % 3)])
            if turn % 5 == 4:
                with database.write() as connection:
                    delete_items(connection, 1, [f"w{number}-{turn - 1}-0"])

    def read() -> None:
        last, known = 0, set[int]()
        while True:
            ending = done.is_set()
            with database.read() as connection:
                statement = select(item.c.seq, item.c.id).where(item.c.gallery_id == 1).order_by(item.c.seq)
                found = [(row.seq, row.id) for row in connection.execute(statement)]
                fed = [row[0] for block in changes(connection, 1, last) for row in block]
            # Below what was seen nothing may turn up that was not there.
            missed.extend(seq for seq, _ in found if seq <= last and seq not in known)
            assert fed == [key for seq, key in found if seq > last] or last == 0
            seen.extend(entry for entry in found if entry[0] > last)
            known |= {seq for seq, _ in found}
            last = max([last, *known])
            if ending:
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        together(4, write)
    finally:
        done.set()
        reader.join()

    assert missed == []
    assert len({seq for seq, _ in seen}) == len(seen)
    with database.lookup() as connection:
        newest = dict(tuple(row) for row in connection.execute(select(item.c.id, item.c.seq)))
    assert {key: max(seq for seq, k in seen if k == key) for _, key in seen} == newest


def test_a_gallery_that_is_locked_with_all_others_has_no_other_writer(database: Database) -> None:
    written = threading.Event()

    def write() -> None:
        store(database, ["a"])
        written.set()

    writer = threading.Thread(target=write)
    with database.write() as connection:
        assert [row.name for row in lock_galleries(connection)] == ["g"]
        writer.start()
        assert not written.wait(0.2)
        assert take_seq(connection, 1, 1) == 1
    writer.join(10)

    assert written.is_set()


def test_chunks_whose_backfill_is_cancelled_while_they_are_computed_change_nothing(database: Database) -> None:
    store(database, [f"i{n}" for n in range(12)])
    number = start(database)
    held = [claim(database, f"w{n}") for n in range(4)]
    with database.write() as connection:
        connection.execute(backfill.update().where(backfill.c.id == number).values(state=BackfillState.CANCELLED))
    lost: list[Chunk] = []

    def work(worker: int) -> None:
        chunk = held[worker]
        assert chunk is not None
        try:
            commit(database, chunk)
        except chunks.ChunkLost:
            lost.append(chunk)

    together(4, work)

    assert len(lost) == 4
    with database.lookup() as connection:
        assert connection.execute(select(embedding.c.item_id).where(embedding.c.version_id == V2)).all() == []
        assert set(connection.execute(select(backfill_chunk.c.state)).scalars()) == {"leased"}


def test_who_asks_for_a_job_while_another_process_is_given_it_for_the_first_time_is_told_no(
    database: Database,
) -> None:
    acquired = []

    def acquire() -> None:
        with database.write() as connection:
            acquired.append(acquire_job(connection, "a job", "two", 10.0))

    other = threading.Thread(target=acquire)
    with database.write() as connection:
        assert acquire_job(connection, "a job", "one", 10.0)
        other.start()
        other.join(0.3)
    other.join()
    assert acquired == [False]
