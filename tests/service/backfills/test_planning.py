"""How backfills end, and what they are limited to."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from sqlalchemy import select

from service.backfills import chunks, planning, traffic
from service.backfills.outcome import Failed
from service.backfills.scores import sorted_scores
from service.backfills.states import BackfillState, change_state, drained
from service.store.sql import database_clock
from service.store.tables import backfill_failure
from staging.states.plans import V2, Clock, Planning, flat


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
        monkeypatch.setattr(planning, "CHUNKS_AT_ONCE", 2)
        ended, active = (stage.start(stage.gallery(9), chunk_size=2) for _ in range(2))

        planning.remove_ended_chunks(stage.database, threading.Event())
        assert [len(stage.planned(one)) for one in (ended, active)] == [5, 5]
        stage.set_state(ended, end)
        planning.remove_ended_chunks(stage.database, threading.Event())

        assert [len(stage.planned(one)) for one in (ended, active)] == [0, 5]
        stage.set_state(active, end)
        planning.remove_ended_chunks(stage.database, Sudden(after=1))
        assert len(stage.planned(active)) == 3, "each transaction removes few"
        planning.remove_ended_chunks(stage.database, threading.Event())
        assert stage.planned(active) == []

    def test_an_item_that_failed_is_not_tried_for_ever(self, stage: Planning) -> None:
        started = stage.start(stage.gallery(4))
        chunk, seen = stage.taken()
        stage.commit(chunk, seen[1:], failed=seen[:1])

        assert stage.finish(started) is BackfillState.DONE
        assert (stage.row(started).done, stage.row(started).failed) == (3, 1)

    def test_a_reason_is_noted_as_one_line_without_zero_characters(self, stage: Planning) -> None:
        stage.start(stage.gallery(1))
        chunk, ((key, seq),) = stage.taken()
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
        chunk, seen = stage.taken()
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


class TestTime:
    def test_what_passes_while_it_is_paused_is_not_counted(
        self, stage: Planning, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock()
        monkeypatch.setattr(database_clock, "time", clock)
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
