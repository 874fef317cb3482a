"""How backfills end, what they are limited to, and what is tried again."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from service.backfills import chunks, completion, traffic
from service.backfills.outcome import Failed
from service.backfills.planner import BackfillState, change_state, drained
from service.backfills.scores import sorted_scores
from service.store import sql_time
from service.store.items import delete_items
from service.store.tables import backfill_failure, item
from staging.plans import V2, Clock, Planning, flat, moved_of


class Sudden(threading.Event):
    """Set once it has been asked about so many times."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


class TestFinish:
    def work(self, stage: Planning) -> None:
        while chunk := stage.claim():
            stage.commit(chunk, stage.read(chunk))

    def test_it_ends_when_nothing_is_left_to_move(self, stage: Planning) -> None:
        started = stage.start(stage.gallery(4))
        self.work(stage)

        assert stage.finish(started) is BackfillState.DONE
        assert stage.row(started).state == BackfillState.DONE
        assert stage.row(started).finished > 0
        assert stage.finish(started) is None

    def test_items_that_came_or_changed_meanwhile_are_planned_again(self, stage: Planning) -> None:
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

    @pytest.mark.parametrize("end", [BackfillState.DONE, BackfillState.CANCELLED])
    def test_chunks_are_removed_once_the_backfill_has_ended(
        self, stage: Planning, end: BackfillState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(completion, "CHUNKS_AT_ONCE", 2)
        ended, active = (stage.start(stage.gallery(9), chunk_size=2) for _ in range(2))

        completion.remove_ended_chunks(stage.database, threading.Event())
        assert [len(stage.planned(one)) for one in (ended, active)] == [5, 5]
        stage.set_state(ended, end)
        completion.remove_ended_chunks(stage.database, threading.Event())

        assert [len(stage.planned(one)) for one in (ended, active)] == [0, 5]
        stage.set_state(active, end)
        completion.remove_ended_chunks(stage.database, Sudden(after=1))
        assert len(stage.planned(active)) == 3, "each transaction removes few"
        completion.remove_ended_chunks(stage.database, threading.Event())
        assert stage.planned(active) == []

    def test_an_item_that_failed_is_not_tried_for_ever(self, stage: Planning) -> None:
        started = stage.start(stage.gallery(4))
        chunk = stage.claim()
        assert chunk
        seen = stage.read(chunk)
        stage.commit(chunk, seen[1:], failed=seen[:1])

        assert stage.finish(started) is BackfillState.DONE
        assert (stage.row(started).done, stage.row(started).failed) == (3, 1)

    def test_a_reason_is_noted_as_one_line_without_zero_characters(self, stage: Planning) -> None:
        stage.start(stage.gallery(1))
        chunk = stage.claim()
        assert chunk
        ((key, seq),) = stage.read(chunk)
        with stage.database.write() as connection:
            chunks.commit(connection, chunk, [], [Failed(key, seq, "input \x00 is\nnot " + 1024 * "y")])

        with stage.database.lookup() as connection:
            (noted,) = connection.execute(select(backfill_failure.c.reason)).scalars()
        assert noted == ("input is not " + 1024 * "y")[:1024]

    def test_it_waits_for_chunks_that_others_hold(self, stage: Planning) -> None:
        started = stage.start(stage.gallery(4))
        stage.claim()

        with stage.database.lookup() as connection:
            assert drained(connection) == []
        assert stage.finish(started) is None
        assert stage.row(started).state == BackfillState.RUNNING

    @pytest.mark.parametrize("state", [BackfillState.PAUSED, BackfillState.CANCELLED])
    def test_one_that_does_not_run_is_left_alone(self, stage: Planning, state: BackfillState) -> None:
        started = stage.start(stage.gallery(4))
        self.work(stage)
        stage.set_state(started, state)

        assert stage.finish(started) is None
        assert stage.row(started).state == state

    def test_a_deleted_one_is_left_alone(self, stage: Planning) -> None:
        assert stage.finish(99) is None


class TestScope:
    def test_a_limit_caps_what_is_moved_and_not_what_is_skipped(self, stage: Planning) -> None:
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
    def test_a_share_is_of_what_qualifies_at_the_start(self, stage: Planning, share: float, moved: int) -> None:
        gallery_id = stage.gallery(10)
        started = stage.start(gallery_id, share=share, item_order="newest")

        assert flat(stage.planned(started)) == [f"i{9 - n}" for n in range(moved)]
        assert stage.row(started).item_limit == moved
        stage.store(gallery_id, ["later"])
        TestFinish().work(stage)
        assert stage.finish(started) is BackfillState.DONE
        assert stage.row(started).done == moved

    def test_share_and_limit_hold_both(self, stage: Planning) -> None:
        started = stage.start(stage.gallery(10), share=0.5, item_limit=2)

        assert flat(stage.planned(started)) == ["i0", "i1"]

    def test_an_origin_leaves_out_what_came_about_otherwise(self, stage: Planning) -> None:
        gallery_id = stage.gallery(3)
        stage.store(gallery_id, ["t0", "t1"], V2, origin="transformed")

        assert flat(stage.planned(stage.start(gallery_id, origin="transformed"))) == ["t0", "t1"]
        assert flat(stage.planned(stage.start(gallery_id, origin="encoded"))) == ["i0", "i1", "i2"]
        assert stage.planned(stage.start(gallery_id, origin="supplied")) == []


class TestOrders:
    def test_what_queries_match_most_comes_first_and_the_oldest_of_equals(self, stage: Planning) -> None:
        gallery_id = stage.gallery(5)
        keys = {name: row.id for name, row in stage.items(gallery_id).items()}
        with stage.database.write() as connection:
            traffic.add(connection, {keys["i3"]: 2, keys["i1"]: 2})
            traffic.add(connection, {keys["i3"]: 4, keys["i4"]: 1, 10**9: 5})

        planned = stage.planned(stage.start(gallery_id, item_order="traffic"))

        assert flat(planned) == ["i3", "i1", "i4", "i0", "i2"]

    def test_what_was_transformed_comes_first_where_that_is_asked_for(self, stage: Planning) -> None:
        gallery_id = stage.gallery(3)
        stage.store(gallery_id, ["t"], V2, origin="transformed")

        assert flat(stage.planned(stage.start(gallery_id, item_order="transformed"))) == ["t", "i0", "i1", "i2"]

    def test_the_least_sure_comes_first_and_what_is_not_known_last(self, stage: Planning) -> None:
        gallery_id = stage.gallery(4)
        keys = {name: row.id for name, row in stage.items(gallery_id).items()}
        unsure = sorted_scores([(np.array([keys[name] for name in ("i1", "i2", "i3")]), np.array([0.5, 0.9, 0.1]))])

        started = stage.start(gallery_id, item_order="uncertainty", told=unsure)

        assert flat(stage.planned(started)) == ["i2", "i1", "i3", "i0"]


class TestRetries:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        clock = Clock()
        monkeypatch.setattr(sql_time, "time", clock)
        return clock

    def fail(self, stage: Planning, names: set[str], retry: bool = True) -> list[str]:
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

    def failures(self, stage: Planning) -> dict[int, Any]:
        with stage.database.lookup() as connection:
            return {row.item_id: row for row in connection.execute(select(backfill_failure))}

    def test_an_item_rests_longer_after_each_failure_and_is_given_up_in_the_end(
        self, stage: Planning, clock: Clock
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

    def test_one_that_goes_well_at_last_is_no_failure(self, stage: Planning, clock: Clock) -> None:
        gallery_id = stage.gallery(4)
        started = stage.start(gallery_id)
        self.fail(stage, {"i2"})
        clock.now += 3
        stage.finish(started)
        self.fail(stage, set())

        assert stage.finish(started) is BackfillState.DONE
        assert self.failures(stage) == {}
        assert (stage.row(started).done, len(stage.origins(gallery_id, V2))) == (4, 4)

    def test_what_another_attempt_cannot_help_is_given_up_at_once(self, stage: Planning, clock: Clock) -> None:
        started = stage.start(stage.gallery(4))
        self.fail(stage, {"i2"}, retry=False)

        assert stage.finish(started) is BackfillState.DONE
        assert stage.row(started).failed == 1

    def test_the_rest_goes_on_meanwhile(self, stage: Planning, clock: Clock) -> None:
        stage.start(stage.gallery(12))

        assert [self.fail(stage, {"i0"})[0] for _ in range(3)] == ["i0", "i4", "i8"]

    def test_an_item_deleted_while_it_rests_is_counted_as_skipped(self, stage: Planning, clock: Clock) -> None:
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
    def test_an_item_written_anew_is_tried_again(self, stage: Planning, clock: Clock, retry: bool) -> None:
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

    def test_what_becomes_of_one_that_failed_touches_no_other(self, stage: Planning, clock: Clock) -> None:
        earlier = stage.start(stage.gallery(4))
        self.fail(stage, {"i0"}, retry=False)
        assert stage.finish(earlier) is BackfillState.DONE
        gallery_id = stage.gallery(8)
        keys = {row.id: name for name, row in stage.items(gallery_id).items()}
        started = stage.start(gallery_id)
        self.fail(stage, {"i0", "i1"}, retry=False)
        self.fail(stage, {"i4", "i5"})
        stage.store(gallery_id, ["i0"])
        with stage.database.write() as connection:
            delete_items(connection, gallery_id, ["i4"])
        clock.now += 3

        assert stage.finish(started) is BackfillState.RUNNING
        given_up = {keys.get(key, "earlier"): row.final for key, row in self.failures(stage).items()}
        assert given_up == {"earlier": True, "i0": False, "i1": True, "i5": False}
        assert sorted(self.fail(stage, set())) == ["i0", "i5"]
        assert stage.finish(started) is BackfillState.DONE
        assert {keys.get(key, "earlier") for key in self.failures(stage)} == {"earlier", "i1"}
        row = stage.row(started)
        assert (row.total, row.done, row.failed, row.skipped) == (8, 6, 1, 1)

    def test_a_backfill_beside_it_is_left_as_it_is(self, stage: Planning, clock: Clock) -> None:
        galleries = [stage.gallery(8) for _ in range(2)]
        beside, mine = (stage.start(gallery_id) for gallery_id in galleries)
        for retry in (False, True):
            for _ in galleries:
                self.fail(stage, {"i0", "i1", "i4", "i5"}, retry)
        for gallery_id in galleries:
            stage.store(gallery_id, ["i0"])
            with stage.database.write() as connection:
                delete_items(connection, gallery_id, ["i1", "i5"])
        clock.now += 3

        def of_beside() -> tuple[Any, list[Any]]:
            return stage.row(beside), [row for row in self.failures(stage).values() if row.backfill_id == beside]

        before = of_beside()
        assert (before[0].done, before[0].failed, len(before[1])) == (4, 2, 4)
        assert stage.finish(mine) is BackfillState.RUNNING
        assert of_beside() == before
        assert sorted(self.fail(stage, set())) == ["i0", "i4"]
        assert of_beside() == before
        assert (stage.row(mine).done, stage.row(mine).failed, stage.row(mine).skipped) == (6, 1, 1)
        assert stage.finish(beside) is BackfillState.RUNNING
        assert sorted(self.fail(stage, set())) == ["i0", "i4"]

    def test_attempts_of_an_earlier_backfill_do_not_count(self, stage: Planning, clock: Clock) -> None:
        gallery_id = stage.gallery(4)
        earlier = stage.start(gallery_id, attempts=2)
        self.fail(stage, {"i2"})
        stage.set_state(earlier, BackfillState.CANCELLED)
        started = stage.start(gallery_id, attempts=2)
        self.fail(stage, {"i2"})

        assert stage.row(started).failed == 0

    def test_what_an_earlier_backfill_gave_up_is_planned_once(self, stage: Planning, clock: Clock) -> None:
        gallery_id = stage.gallery(4)
        earlier = stage.start(gallery_id)
        self.fail(stage, {"i2"}, retry=False)
        assert stage.finish(earlier) is BackfillState.DONE
        stage.store(gallery_id, ["i2", "new"])
        started = stage.start(gallery_id)
        self.fail(stage, {"new"})
        stage.store(gallery_id, ["i2"])
        clock.now += 3

        assert stage.finish(started) is BackfillState.RUNNING
        assert stage.planned(started)[1:] == [["i2"], ["new"]]
        assert (stage.row(started).total, stage.row(started).failed) == (3, 0)

    def test_the_cap_counts_an_item_once_however_often_it_is_tried(self, stage: Planning, clock: Clock) -> None:
        started = stage.start(stage.gallery(8), item_limit=4)
        self.fail(stage, {"i2"})
        clock.now += 3

        assert stage.finish(started) is BackfillState.RUNNING
        assert stage.planned(started)[1:] == [["i2"]]

    def test_a_clock_that_was_set_back_does_not_make_an_item_rest_for_ever(self, stage: Planning, clock: Clock) -> None:
        started = stage.start(stage.gallery(4))
        self.fail(stage, {"i2"})
        clock.now -= 10_000

        assert stage.finish(started) is BackfillState.RUNNING


class TestTime:
    def test_what_passes_while_it_is_paused_is_not_counted(
        self, stage: Planning, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock()
        monkeypatch.setattr(sql_time, "time", clock)
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
                assert change_state(connection, started, (before,), after)

        row = stage.row(started)
        assert (row.active_seconds, row.resumed, row.finished) == (15, None, clock.now)
        assert row.revision == 7
