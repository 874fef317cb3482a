"""Planning and chunks against a database without versions on disk: vectors are made up, nothing is encoded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event, insert, select, update
from sqlalchemy.dialects import postgresql

from service.backfills import attempts, chunks, planner, traffic
from service.backfills.chunks import Chunk, ChunkLost
from service.backfills.outcome import EmbeddedItems, Failed
from service.backfills.planner import BackfillState, Kind, drained, finish_or_extend, plan, turn
from service.errors import UnknownGallery
from service.settings import Settings
from service.store.database import Database, upgrade
from service.store.repository import NewItem, delete_gallery, delete_items, store_items, take_seq
from service.store.tables import backfill, backfill_chunk, backfill_failure, edge, embedding, gallery, item, version

V1, V2, V3 = 1, 2, 3
LEASE = 30.0
ONE = np.ones(2, np.float32)


def moved_of(seen: list[tuple[int, int]]) -> list[EmbeddedItems]:
    """What a worker makes of items, by key, as they were at a number: in two steps, as an encoder's batches come."""
    steps = (seen[:2], seen[2:])
    return [EmbeddedItems([k for k, _ in s], [n for _, n in s], np.tile(2 * ONE, (len(s), 1))) for s in steps]


class Clock:
    """The time as the code under test sees it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


class Stage:
    """A database with versions 1 to 3, of which 1 has an item edge to 3, and whatever a test puts on it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        with database.write() as connection:
            for name in ("v1", "v2", "v3"):
                row = {"name": name, "card": {}, "card_sha256": name, "created": 0.0}
                connection.execute(insert(version).values(row))
            known = {"origin": "registered", "evidence": {}, "made": {}, "files": {}, "created": 0}
            connection.execute(insert(edge).values(new_id=V3, old_id=V1, kind="forward", **known))
            connection.execute(insert(edge).values(new_id=V3, old_id=V2, kind="identity", **known))

    def gallery(self, items: int = 10, version_id: int = V1, **new: Any) -> int:
        with self.database.write() as connection:
            row = {"name": f"g{items}-{id(new)}", "created": 0.0, "next_seq": 1}
            gallery_id = connection.execute(insert(gallery).values(row).returning(gallery.c.id)).scalar_one()
        self.store(gallery_id, [f"i{n}" for n in range(items)], version_id, **new)
        return gallery_id

    def store(self, gallery_id: int, ids: list[str], version_id: int = V1, **new: Any) -> None:
        made = {"metadata": {}, "origin": "encoded", "vector": ONE, "blob": "b", **new}
        with self.database.write() as connection:
            first = take_seq(connection, gallery_id, len(ids))
            store_items(connection, gallery_id, version_id, [NewItem(external_id=i, **made) for i in ids], first)

    def start(self, gallery_id: int, kind: Kind = Kind.REENCODE, version_id: int = V2, **fields: Any) -> int:
        with self.database.write() as connection:
            row = {
                "gallery_id": gallery_id,
                "version_id": version_id,
                "kind": kind,
                "item_order": "oldest",
                "state": BackfillState.RUNNING,
                "chunk_size": 4,
                "next_claim": 0.0,
                "total": 0,
                "created": 0.0,
                **fields,
            }
            planned = connection.execute(insert(backfill).values(row).returning(backfill)).one()
            plan(connection, planned)
        return planned.id

    def claim(self, owner: str = "w") -> Chunk | None:
        with self.database.write() as connection:
            return chunks.claim(connection, owner, LEASE)

    def read(self, chunk: Chunk) -> list[tuple[int, int]]:
        with self.database.read() as connection:
            return [(row.id, row.seq) for row in chunks.read_images(connection, chunk)]

    def commit(self, chunk: Chunk, moved: list[tuple[int, int]], failed: Any = ()) -> dict[str, int]:
        with self.database.write() as connection:
            made = moved_of(moved)
            return chunks.commit(connection, chunk, made, [Failed(key, seq, "why") for key, seq in failed])

    def finish(self, backfill_id: int) -> BackfillState | None:
        with self.database.write() as connection:
            return finish_or_extend(connection, backfill_id)

    def set_state(self, backfill_id: int, state: BackfillState) -> None:
        with self.database.write() as connection:
            connection.execute(update(backfill).where(backfill.c.id == backfill_id).values(state=state))

    def row(self, backfill_id: int) -> Any:
        with self.database.lookup() as connection:
            return connection.execute(select(backfill).where(backfill.c.id == backfill_id)).one()

    def planned(self, backfill_id: int) -> list[list[str]]:
        """External ids, chunk by chunk."""
        with self.database.lookup() as connection:
            names = dict(tuple(row) for row in connection.execute(select(item.c.id, item.c.external_id)))
            mine = select(backfill_chunk.c.item_ids).where(backfill_chunk.c.backfill_id == backfill_id)
            cut = connection.execute(mine.order_by(backfill_chunk.c.number)).scalars()
            return [[names[key] for key in keys] for keys in cut]

    def items(self, gallery_id: int) -> dict[str, Any]:
        with self.database.lookup() as connection:
            rows = connection.execute(select(item).where(item.c.gallery_id == gallery_id))
            return {row.external_id: row for row in rows}

    def origins(self, gallery_id: int, version_id: int) -> dict[str, str]:
        with self.database.lookup() as connection:
            held = select(item.c.external_id, embedding.c.origin).join(embedding, embedding.c.item_id == item.c.id)
            mine = (item.c.gallery_id == gallery_id, embedding.c.version_id == version_id)
            return {row.external_id: row.origin for row in connection.execute(held.where(*mine))}

    def everything(self) -> list[list[Any]]:
        with self.database.lookup() as connection:
            tables = (gallery, item, embedding, backfill, backfill_chunk, backfill_failure)
            return [list(connection.execute(select(table).order_by(*table.primary_key))) for table in tables]


def flat(planned: list[list[str]]) -> list[str]:
    return list(chain.from_iterable(planned))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    settings = Settings(data=tmp_path)
    upgrade(settings)
    database = Database(settings.database_url)
    yield Stage(database)
    database.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(chunks, "time", clock)
    return clock


class TestPlan:
    def test_items_are_cut_into_chunks_in_the_order_asked_for(self, stage: Stage) -> None:
        gallery_id = stage.gallery(10)

        oldest, newest, drawn = (
            stage.planned(stage.start(gallery_id, item_order=order)) for order in ("oldest", "newest", "random")
        )

        assert [len(chunk) for chunk in oldest] == [4, 4, 2]
        assert flat(oldest) == [f"i{n}" for n in range(10)]
        assert flat(newest) == [f"i{n}" for n in reversed(range(10))]
        assert sorted(flat(drawn)) == flat(oldest)
        assert flat(drawn) not in (flat(oldest), flat(newest))

    def test_reencode_takes_what_has_an_image_and_no_embedding_of_its_own(self, stage: Stage) -> None:
        gallery_id = stage.gallery(2)
        stage.store(gallery_id, ["without image"], blob=None)
        stage.store(gallery_id, ["encoded"], V2)
        stage.store(gallery_id, ["supplied"], V2, origin="supplied")
        stage.store(gallery_id, ["transformed"], V2, origin="transformed")
        with stage.database.write() as connection:
            delete_items(connection, gallery_id, ["i0"])
        stage.gallery(3)

        started = stage.start(gallery_id)

        assert flat(stage.planned(started)) == ["i1", "transformed"]
        assert stage.row(started).total == 2

    def test_transform_takes_what_is_active_in_a_version_with_an_item_edge(self, stage: Stage) -> None:
        gallery_id = stage.gallery(2)
        stage.store(gallery_id, ["v1 without image"], blob=None)
        stage.store(gallery_id, ["v2"], V2)
        stage.store(gallery_id, ["v3"], V3)

        assert flat(stage.planned(stage.start(gallery_id, Kind.TRANSFORM, V3))) == ["i0", "i1", "v1 without image"]
        assert stage.planned(stage.start(gallery_id, Kind.TRANSFORM, V2)) == []


class TestClaim:
    def test_every_worker_gets_another_chunk_until_none_is_left(self, stage: Stage) -> None:
        stage.start(stage.gallery(10))

        claimed = [stage.claim(owner) for owner in "abcd"]

        assert [len(chunk.item_ids) for chunk in claimed if chunk] == [4, 4, 2]
        assert claimed[3] is None
        assert [chunk.owner for chunk in claimed if chunk] == ["a", "b", "c"]

    def test_a_lease_that_ran_out_is_taken_over_and_not_before(self, stage: Stage, clock: Clock) -> None:
        stage.start(stage.gallery(4))
        first = stage.claim("a")
        clock.now += LEASE - 1
        assert stage.claim("b") is None
        clock.now += 2

        taken = stage.claim("b")

        assert first
        assert taken
        assert (taken.id, taken.owner) == (first.id, "b")

    def test_a_sign_of_life_keeps_the_lease(self, stage: Stage, clock: Clock) -> None:
        stage.start(stage.gallery(4))
        chunk = stage.claim("a")
        assert chunk
        clock.now += LEASE - 1
        with stage.database.write() as connection:
            assert chunks.extend(connection, chunk, LEASE)
        clock.now += LEASE - 1
        assert stage.claim("b") is None
        clock.now += 2
        assert stage.claim("b")
        with stage.database.write() as connection:
            assert not chunks.extend(connection, chunk, LEASE)

    @pytest.mark.parametrize("state", [BackfillState.PAUSED, BackfillState.CANCELLED, BackfillState.DONE])
    def test_only_a_running_backfill_gives_chunks(self, stage: Stage, state: BackfillState) -> None:
        stage.set_state(stage.start(stage.gallery(4)), state)

        assert stage.claim() is None

    def test_galleries_take_turns(self, stage: Stage, clock: Clock) -> None:
        galleries = [stage.gallery(8), stage.gallery(8)]
        for gallery_id in galleries:
            stage.start(gallery_id)

        turns = []
        for _ in range(4):
            clock.now += 1
            chunk = stage.claim()
            assert chunk
            turns.append(chunk.gallery_id)

        assert turns == [*galleries, *galleries]

    def test_a_rate_holds_over_all_workers_and_time(self, stage: Stage, clock: Clock) -> None:
        """20 items a second in chunks of 4: five chunks a second, however often and by how many it is asked."""
        stage.start(stage.gallery(400), rate=20.0, next_claim=clock.now)

        claimed = 0
        for tick in range(600):
            clock.now = 1000.0 + tick / 60
            claimed += stage.claim(f"w{tick % 3}") is not None

        assert claimed * 4 == pytest.approx(20 * 10, abs=4)

    def test_what_was_not_used_of_a_rate_is_made_up_for_by_a_second_at_most(self, stage: Stage, clock: Clock) -> None:
        stage.start(stage.gallery(400), rate=20.0, next_claim=clock.now)
        clock.now += 3600

        burst = 0
        while stage.claim() is not None:
            burst += 4

        assert burst == pytest.approx(20, abs=4)

    @pytest.mark.parametrize("rate", [20.0, None])
    def test_a_clock_that_was_set_back_stops_nobody(self, stage: Stage, clock: Clock, rate: float | None) -> None:
        stage.start(stage.gallery(400), rate=rate, next_claim=clock.now)
        assert stage.claim()
        clock.now -= 500

        claimed = 0
        for _ in range(120):
            clock.now += 1 / 60
            claimed += stage.claim() is not None

        # All 400 and not 396: a lease that ends further ahead than any is given is over, whoever held it.
        assert claimed * 4 == (pytest.approx(20 * 2 + 20, abs=8) if rate else 400)

    def test_a_chunk_that_was_given_back_is_free_at_once(self, stage: Stage) -> None:
        stage.start(stage.gallery(4))
        chunk = stage.claim("a")
        assert chunk
        with stage.database.write() as connection:
            chunks.release(connection, chunk)

        again = stage.claim("b")

        assert again
        assert again.id == chunk.id


def test_every_statement_can_be_said_to_postgresql_where_claims_pass_by_locked_chunks(stage: Stage) -> None:
    said: list[str] = []

    def note(_: Any, statement: Any, *__: Any) -> None:
        said.append(str(statement.compile(dialect=postgresql.dialect())))

    event.listen(stage.database._writer, "before_execute", note)
    gallery_id = stage.gallery(4)
    started = stage.start(gallery_id, rate=1000.0)
    chunk = stage.claim()
    assert chunk
    stage.commit(chunk, stage.read(chunk)[1:], failed=stage.read(chunk)[:1])
    stage.finish(started)

    assert len(said) > 15
    assert sum("FOR UPDATE SKIP LOCKED" in statement for statement in said) == 2


class TestCommit:
    def test_items_get_the_embedding_the_active_version_and_rising_numbers(self, stage: Stage) -> None:
        gallery_id = stage.gallery(4)
        started = stage.start(gallery_id)
        chunk = stage.claim()
        assert chunk

        counts = stage.commit(chunk, stage.read(chunk))

        items = stage.items(gallery_id)
        assert counts == {"done": 4, "failed": 0, "skipped": 0, "retried": 0}
        assert [row.active_id for row in items.values()] == [V2] * 4
        assert sorted(row.seq for row in items.values()) == [5, 6, 7, 8]
        assert set(stage.origins(gallery_id, V2).values()) == {"encoded"}
        assert len(stage.origins(gallery_id, V1)) == 4
        assert (stage.row(started).done, stage.row(started).total) == (4, 4)

    def test_a_transformed_embedding_says_so_and_a_reencode_replaces_it(self, stage: Stage) -> None:
        gallery_id = stage.gallery(4)
        for kind, origin in ((Kind.TRANSFORM, "transformed"), (Kind.REENCODE, "encoded")):
            stage.start(gallery_id, kind, V3)
            chunk = stage.claim()
            assert chunk
            stage.commit(chunk, stage.read(chunk))

            assert set(stage.origins(gallery_id, V3).values()) == {origin}

    def test_an_item_written_or_deleted_since_it_was_read_is_skipped(self, stage: Stage) -> None:
        gallery_id = stage.gallery(4)
        started = stage.start(gallery_id)
        chunk = stage.claim()
        assert chunk
        seen = stage.read(chunk)
        stage.store(gallery_id, ["i0"])
        with stage.database.write() as connection:
            delete_items(connection, gallery_id, ["i1"])

        counts = stage.commit(chunk, seen)

        assert counts == {"done": 2, "failed": 0, "skipped": 2, "retried": 0}
        assert set(stage.origins(gallery_id, V2)) == {"i2", "i3"}
        items = stage.items(gallery_id)
        assert (items["i0"].active_id, items["i1"].deleted, items["i1"].active_id) == (V1, True, None)
        assert stage.row(started).skipped == 2

    def test_the_failure_of_an_item_written_since_is_not_recorded(self, stage: Stage) -> None:
        gallery_id = stage.gallery(4)
        stage.start(gallery_id)
        chunk = stage.claim()
        assert chunk
        seen = stage.read(chunk)
        stage.store(gallery_id, ["i0"])

        assert stage.commit(chunk, seen[2:], failed=seen[:2]) == {"done": 2, "failed": 1, "skipped": 1, "retried": 0}

    def test_a_worker_that_lost_its_lease_writes_nothing(self, stage: Stage, clock: Clock) -> None:
        stage.start(stage.gallery(4))
        late = stage.claim("late")
        assert late
        seen = stage.read(late)
        clock.now += LEASE + 1
        assert stage.claim("heir")
        before = stage.everything()

        with pytest.raises(ChunkLost):
            stage.commit(late, seen)

        assert stage.everything() == before

    def test_a_worker_whose_heir_was_faster_writes_nothing(self, stage: Stage, clock: Clock) -> None:
        gallery_id = stage.gallery(4)
        stage.start(gallery_id)
        late = stage.claim("late")
        assert late
        seen = stage.read(late)
        clock.now += LEASE + 1
        heir = stage.claim("heir")
        assert heir
        stage.commit(heir, stage.read(heir))
        before = stage.everything()

        with pytest.raises(ChunkLost):
            stage.commit(late, seen)

        assert stage.everything() == before

    def test_a_lease_that_ran_out_unnoticed_may_still_be_committed_once(self, stage: Stage, clock: Clock) -> None:
        stage.start(stage.gallery(4))
        chunk = stage.claim()
        assert chunk
        seen = stage.read(chunk)
        clock.now += 10 * LEASE

        assert stage.commit(chunk, seen)["done"] == 4
        with pytest.raises(ChunkLost):
            stage.commit(chunk, seen)

    @pytest.mark.parametrize("state", [BackfillState.PAUSED, BackfillState.CANCELLED])
    def test_a_backfill_that_stopped_meanwhile_gets_nothing_written(self, stage: Stage, state: BackfillState) -> None:
        started = stage.start(stage.gallery(4))
        chunk = stage.claim()
        assert chunk
        seen = stage.read(chunk)
        stage.set_state(started, state)
        before = stage.everything()

        with pytest.raises(ChunkLost):
            stage.commit(chunk, seen)

        assert stage.everything() == before

    def test_a_gallery_that_was_deleted_meanwhile_gets_nothing_written(self, stage: Stage) -> None:
        gallery_id = stage.gallery(4)
        stage.start(gallery_id)
        chunk = stage.claim()
        assert chunk
        seen = stage.read(chunk)
        with stage.database.write() as connection:
            delete_gallery(connection, gallery_id)

        with pytest.raises(UnknownGallery):
            stage.commit(chunk, seen)
        assert stage.everything() == [[]] * 6


class TestFinish:
    def work(self, stage: Stage) -> None:
        while chunk := stage.claim():
            stage.commit(chunk, stage.read(chunk))

    def test_it_ends_when_nothing_is_left_to_move(self, stage: Stage) -> None:
        started = stage.start(stage.gallery(4))
        self.work(stage)

        assert stage.finish(started) is BackfillState.DONE
        assert stage.row(started).state == BackfillState.DONE
        assert stage.row(started).finished > 0
        assert stage.finish(started) is None

    def test_items_that_came_or_changed_meanwhile_are_planned_again(self, stage: Stage) -> None:
        gallery_id = stage.gallery(4)
        started = stage.start(gallery_id)
        self.work(stage)
        stage.store(gallery_id, ["i1", "new"])

        assert stage.finish(started) is BackfillState.RUNNING
        assert stage.planned(started)[1:] == [["i1", "new"]]
        assert stage.row(started).total == 6
        self.work(stage)
        assert stage.finish(started) is BackfillState.DONE
        assert len(stage.origins(gallery_id, V2)) == 5

    def test_an_item_that_failed_is_not_tried_for_ever(self, stage: Stage) -> None:
        started = stage.start(stage.gallery(4))
        chunk = stage.claim()
        assert chunk
        seen = stage.read(chunk)
        stage.commit(chunk, seen[1:], failed=seen[:1])

        assert stage.finish(started) is BackfillState.DONE
        assert (stage.row(started).done, stage.row(started).failed) == (3, 1)

    def test_it_waits_for_chunks_that_others_hold(self, stage: Stage) -> None:
        started = stage.start(stage.gallery(4))
        stage.claim()

        with stage.database.lookup() as connection:
            assert drained(connection) == []
        assert stage.finish(started) is None
        assert stage.row(started).state == BackfillState.RUNNING

    @pytest.mark.parametrize("state", [BackfillState.PAUSED, BackfillState.CANCELLED])
    def test_one_that_does_not_run_is_left_alone(self, stage: Stage, state: BackfillState) -> None:
        started = stage.start(stage.gallery(4))
        self.work(stage)
        stage.set_state(started, state)

        assert stage.finish(started) is None
        assert stage.row(started).state == state

    def test_a_deleted_one_is_left_alone(self, stage: Stage) -> None:
        assert stage.finish(99) is None


class TestScope:
    def test_a_limit_caps_what_is_moved_and_not_what_is_skipped(self, stage: Stage) -> None:
        gallery_id = stage.gallery(10)
        started = stage.start(gallery_id, item_limit=6)
        assert flat(stage.planned(started)) == [f"i{n}" for n in range(6)]
        chunk = stage.claim()
        assert chunk
        seen = stage.read(chunk)
        stage.store(gallery_id, ["i0"])  # changed meanwhile: its place is given to the next in order
        stage.commit(chunk, seen)
        TestFinish().work(stage)

        assert stage.finish(started) is BackfillState.RUNNING
        assert stage.planned(started)[-1] == ["i0"]
        TestFinish().work(stage)
        assert stage.finish(started) is BackfillState.DONE
        assert set(stage.origins(gallery_id, V2)) == {f"i{n}" for n in range(6)}
        assert (stage.row(started).done, stage.row(started).skipped) == (6, 1)

    @pytest.mark.parametrize(("share", "moved"), [(0.25, 2), (0.29, 2), (0.3, 3), (1.0, 10), (0.01, 1)])
    def test_a_share_is_of_what_qualifies_at_the_start(self, stage: Stage, share: float, moved: int) -> None:
        gallery_id = stage.gallery(10)
        started = stage.start(gallery_id, share=share, item_order="newest")

        assert flat(stage.planned(started)) == [f"i{9 - n}" for n in range(moved)]
        assert stage.row(started).item_limit == moved
        stage.store(gallery_id, ["later"])
        TestFinish().work(stage)
        assert stage.finish(started) is BackfillState.DONE
        assert stage.row(started).done == moved

    def test_share_and_limit_hold_both(self, stage: Stage) -> None:
        started = stage.start(stage.gallery(10), share=0.5, item_limit=2)

        assert flat(stage.planned(started)) == ["i0", "i1"]

    def test_an_origin_leaves_out_what_came_about_otherwise(self, stage: Stage) -> None:
        gallery_id = stage.gallery(3)
        stage.store(gallery_id, ["t0", "t1"], V2, origin="transformed")

        assert flat(stage.planned(stage.start(gallery_id, origin="transformed"))) == ["t0", "t1"]
        assert flat(stage.planned(stage.start(gallery_id, origin="encoded"))) == ["i0", "i1", "i2"]
        assert stage.planned(stage.start(gallery_id, origin="supplied")) == []


class TestOrders:
    def test_what_queries_match_most_comes_first_and_the_oldest_of_equals(self, stage: Stage) -> None:
        gallery_id = stage.gallery(5)
        keys = {name: row.id for name, row in stage.items(gallery_id).items()}
        with stage.database.write() as connection:
            traffic.add(connection, {keys["i3"]: 2, keys["i1"]: 2})
            traffic.add(connection, {keys["i3"]: 4, keys["i4"]: 1, 10**9: 5})

        planned = stage.planned(stage.start(gallery_id, item_order="traffic"))

        assert flat(planned) == ["i3", "i1", "i4", "i0", "i2"]

    def test_what_was_transformed_comes_first_where_that_is_asked_for(self, stage: Stage) -> None:
        gallery_id = stage.gallery(3)
        stage.store(gallery_id, ["t"], V2, origin="transformed")

        assert flat(stage.planned(stage.start(gallery_id, item_order="transformed"))) == ["t", "i0", "i1", "i2"]

    def test_the_least_sure_comes_first_and_what_is_not_known_last(self, stage: Stage) -> None:
        gallery_id = stage.gallery(4)
        keys = {name: row.id for name, row in stage.items(gallery_id).items()}
        started = stage.start(gallery_id, item_order="uncertainty", item_limit=0)
        with stage.database.write() as connection:
            connection.execute(update(backfill).where(backfill.c.id == started).values(item_limit=None))
            row = connection.execute(select(backfill).where(backfill.c.id == started)).one()
            plan(connection, row, {keys["i1"]: 0.5, keys["i2"]: 0.9, keys["i3"]: 0.1})

        assert flat(stage.planned(started)) == ["i2", "i1", "i3", "i0"]


class TestRetries:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        clock = Clock()
        for module in (chunks, planner, attempts):
            monkeypatch.setattr(module, "time", clock)
        return clock

    def fail(self, stage: Stage, names: set[str], retry: bool = True) -> list[str]:
        """Claim a chunk and commit it, with failures; returns the chunk's items by name."""
        chunk = stage.claim()
        assert chunk
        with stage.database.lookup() as connection:
            known = dict(tuple(row) for row in connection.execute(select(item.c.id, item.c.external_id)))
        seen = stage.read(chunk)
        with stage.database.write() as connection:
            made = moved_of([(key, seq) for key, seq in seen if known[key] not in names])
            failed = [Failed(key, seq, "why", "refused", retry) for key, seq in seen if known[key] in names]
            chunks.commit(connection, chunk, made, failed)
        return [known[key] for key in chunk.item_ids]

    def failures(self, stage: Stage) -> dict[int, Any]:
        with stage.database.lookup() as connection:
            return {row.item_id: row for row in connection.execute(select(backfill_failure))}

    def test_an_item_rests_longer_after_each_failure_and_is_given_up_in_the_end(
        self, stage: Stage, clock: Clock
    ) -> None:
        started = stage.start(stage.gallery(4), attempts=3)
        self.fail(stage, {"i2"})
        assert (stage.row(started).done, stage.row(started).failed) == (3, 0)
        for pause in (2.0, 4.0):
            clock.now += pause - 0.5
            assert stage.finish(started) is None
            assert stage.claim() is None
            clock.now += 1
            assert stage.finish(started) is BackfillState.RUNNING
            assert self.fail(stage, {"i2"}) == ["i2"]

        assert stage.finish(started) is BackfillState.DONE
        (failure,) = self.failures(stage).values()
        assert (failure.attempts, failure.final, failure.next_try) == (3, True, None)
        row = stage.row(started)
        assert (row.total, row.done, row.failed, row.skipped) == (4, 3, 1, 0)

    def test_one_that_goes_well_at_last_is_no_failure(self, stage: Stage, clock: Clock) -> None:
        gallery_id = stage.gallery(4)
        started = stage.start(gallery_id)
        self.fail(stage, {"i2"})
        clock.now += 3
        stage.finish(started)
        self.fail(stage, set())

        assert stage.finish(started) is BackfillState.DONE
        assert self.failures(stage) == {}
        assert (stage.row(started).done, len(stage.origins(gallery_id, V2))) == (4, 4)

    def test_what_another_attempt_cannot_help_is_given_up_at_once(self, stage: Stage, clock: Clock) -> None:
        started = stage.start(stage.gallery(4))
        self.fail(stage, {"i2"}, retry=False)

        assert stage.finish(started) is BackfillState.DONE
        assert stage.row(started).failed == 1

    def test_the_rest_goes_on_meanwhile(self, stage: Stage, clock: Clock) -> None:
        stage.start(stage.gallery(12))

        assert [self.fail(stage, {"i0"})[0] for _ in range(3)] == ["i0", "i4", "i8"]

    def test_an_item_deleted_while_it_rests_is_counted_as_skipped(self, stage: Stage, clock: Clock) -> None:
        gallery_id = stage.gallery(4)
        started = stage.start(gallery_id)
        self.fail(stage, {"i2"})
        with stage.database.write() as connection:
            delete_items(connection, gallery_id, ["i2"])
        clock.now += 3

        assert stage.finish(started) is BackfillState.DONE
        row = stage.row(started)
        assert (row.total, row.done, row.failed, row.skipped) == (4, 3, 0, 1)
        assert self.failures(stage) == {}

    @pytest.mark.parametrize("retry", [True, False])
    def test_an_item_written_anew_is_tried_again(self, stage: Stage, clock: Clock, retry: bool) -> None:
        gallery_id = stage.gallery(4)
        started = stage.start(gallery_id)
        self.fail(stage, {"i2"}, retry)
        stage.store(gallery_id, ["i2"])
        clock.now += 3

        assert stage.finish(started) is BackfillState.RUNNING
        assert self.fail(stage, set()) == ["i2"]
        assert stage.finish(started) is BackfillState.DONE
        row = stage.row(started)
        assert (row.total, row.done, row.failed, row.skipped) == (4, 4, 0, 0)

    def test_the_cap_counts_an_item_once_however_often_it_is_tried(self, stage: Stage, clock: Clock) -> None:
        started = stage.start(stage.gallery(8), item_limit=4)
        self.fail(stage, {"i2"})
        clock.now += 3

        assert stage.finish(started) is BackfillState.RUNNING
        assert stage.planned(started)[1:] == [["i2"]]

    def test_a_clock_that_was_set_back_does_not_make_an_item_rest_for_ever(self, stage: Stage, clock: Clock) -> None:
        started = stage.start(stage.gallery(4))
        self.fail(stage, {"i2"})
        clock.now -= 10_000

        assert stage.finish(started) is BackfillState.RUNNING


class TestTime:
    def test_what_passes_while_it_is_paused_is_not_counted(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock()
        monkeypatch.setattr(planner, "time", clock)
        started = stage.start(stage.gallery(4), resumed=clock.now)
        for passed, before, after in (
            (10, BackfillState.RUNNING, BackfillState.PAUSED),
            (1000, BackfillState.PAUSED, BackfillState.RUNNING),
            (-500, BackfillState.RUNNING, BackfillState.PAUSED),
            (7, BackfillState.PAUSED, BackfillState.RUNNING),
            (5, BackfillState.RUNNING, BackfillState.CANCELLED),
        ):
            clock.now += passed
            with stage.database.write() as connection:
                assert turn(connection, started, (before,), after)

        row = stage.row(started)
        assert (row.active_seconds, row.resumed, row.finished) == (15, None, clock.now)
        assert row.revision == 6
