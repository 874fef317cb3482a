"""Items that failed are tried again, until they are given up."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from service.backfills import chunks
from service.backfills.outcome import Failed
from service.backfills.states import BackfillState
from service.store.galleries.items import delete_items
from service.store.tables import backfill_failure, item
from staging.states.plans import V2, Clock, Planning, moved_of


def fail(stage: Planning, names: set[str], retry: bool = True) -> list[str]:
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


def failures(stage: Planning) -> dict[int, Any]:
    with stage.database.lookup() as connection:
        return {row.item_id: row for row in connection.execute(select(backfill_failure))}


def test_an_item_rests_longer_after_each_failure_and_is_given_up_in_the_end(stage: Planning, clock: Clock) -> None:
    started = stage.start(stage.gallery(4), attempts=3)
    fail(stage, {"i2"})
    assert (stage.row(started).done, stage.row(started).failed) == (3, 0)
    for pause in (2.0, 4.0):
        clock.now += pause - 0.5
        assert stage.finish(started) is None
        assert stage.claim() is None
        clock.now += 1
        assert stage.finish(started) is BackfillState.RUNNING
        assert fail(stage, {"i2"}) == ["i2"]

    assert stage.finish(started) is BackfillState.DONE
    (failure,) = failures(stage).values()
    assert (failure.attempts, failure.final, failure.next_try) == (3, True, None)
    row = stage.row(started)
    assert (row.total, row.done, row.failed, row.skipped) == (4, 3, 1, 0)


def test_one_that_goes_well_at_last_is_no_failure(stage: Planning, clock: Clock) -> None:
    gallery_id = stage.gallery(4)
    started = stage.start(gallery_id)
    fail(stage, {"i2"})
    clock.now += 3
    stage.finish(started)
    fail(stage, set())

    assert stage.finish(started) is BackfillState.DONE
    assert failures(stage) == {}
    assert (stage.row(started).done, len(stage.origins(gallery_id, V2))) == (4, 4)


def test_what_another_attempt_cannot_help_is_given_up_at_once(stage: Planning, clock: Clock) -> None:
    started = stage.start(stage.gallery(4))
    fail(stage, {"i2"}, retry=False)

    assert stage.finish(started) is BackfillState.DONE
    assert stage.row(started).failed == 1


def test_the_rest_goes_on_meanwhile(stage: Planning, clock: Clock) -> None:
    stage.start(stage.gallery(12))

    assert [fail(stage, {"i0"})[0] for _ in range(3)] == ["i0", "i4", "i8"]


def test_an_item_deleted_while_it_rests_is_counted_as_skipped(stage: Planning, clock: Clock) -> None:
    gallery_id = stage.gallery(4)
    started = stage.start(gallery_id)
    fail(stage, {"i2"})
    with stage.database.write() as connection:
        delete_items(connection, gallery_id, ["i2"])
    clock.now += 3

    assert stage.finish(started) is BackfillState.DONE
    row = stage.row(started)
    assert (row.total, row.done, row.failed, row.skipped) == (4, 3, 0, 1)
    assert failures(stage) == {}


@pytest.mark.parametrize("retry", [True, False])
def test_an_item_written_anew_is_tried_again(stage: Planning, clock: Clock, retry: bool) -> None:
    gallery_id = stage.gallery(4)
    started = stage.start(gallery_id)
    fail(stage, {"i2"}, retry)
    stage.store(gallery_id, ["i2"])
    clock.now += 3

    assert stage.finish(started) is BackfillState.RUNNING
    assert fail(stage, set()) == ["i2"]
    assert stage.finish(started) is BackfillState.DONE
    row = stage.row(started)
    assert (row.total, row.done, row.failed, row.skipped) == (4, 4, 0, 0)


def test_what_becomes_of_one_that_failed_touches_no_other(stage: Planning, clock: Clock) -> None:
    earlier = stage.start(stage.gallery(4))
    fail(stage, {"i0"}, retry=False)
    assert stage.finish(earlier) is BackfillState.DONE
    gallery_id = stage.gallery(8)
    keys = {row.id: name for name, row in stage.items(gallery_id).items()}
    started = stage.start(gallery_id)
    fail(stage, {"i0", "i1"}, retry=False)
    fail(stage, {"i4", "i5"})
    stage.store(gallery_id, ["i0"])
    with stage.database.write() as connection:
        delete_items(connection, gallery_id, ["i4"])
    clock.now += 3

    assert stage.finish(started) is BackfillState.RUNNING
    given_up = {keys.get(key, "earlier"): row.final for key, row in failures(stage).items()}
    assert given_up == {"earlier": True, "i0": False, "i1": True, "i5": False}
    assert sorted(fail(stage, set())) == ["i0", "i5"]
    assert stage.finish(started) is BackfillState.DONE
    assert {keys.get(key, "earlier") for key in failures(stage)} == {"earlier", "i1"}
    row = stage.row(started)
    assert (row.total, row.done, row.failed, row.skipped) == (8, 6, 1, 1)


def test_a_backfill_beside_it_is_left_as_it_is(stage: Planning, clock: Clock) -> None:
    galleries = [stage.gallery(8) for _ in range(2)]
    beside, mine = (stage.start(gallery_id) for gallery_id in galleries)
    for retry in (False, True):
        for _ in galleries:
            fail(stage, {"i0", "i1", "i4", "i5"}, retry)
    for gallery_id in galleries:
        stage.store(gallery_id, ["i0"])
        with stage.database.write() as connection:
            delete_items(connection, gallery_id, ["i1", "i5"])
    clock.now += 3

    def of_beside() -> tuple[Any, list[Any]]:
        return stage.row(beside), [row for row in failures(stage).values() if row.backfill_id == beside]

    before = of_beside()
    assert (before[0].done, before[0].failed, len(before[1])) == (4, 2, 4)
    assert stage.finish(mine) is BackfillState.RUNNING
    assert of_beside() == before
    assert sorted(fail(stage, set())) == ["i0", "i4"]
    assert of_beside() == before
    assert (stage.row(mine).done, stage.row(mine).failed, stage.row(mine).skipped) == (6, 1, 1)
    assert stage.finish(beside) is BackfillState.RUNNING
    assert sorted(fail(stage, set())) == ["i0", "i4"]


def test_attempts_of_an_earlier_backfill_do_not_count(stage: Planning, clock: Clock) -> None:
    gallery_id = stage.gallery(4)
    earlier = stage.start(gallery_id, attempts=2)
    fail(stage, {"i2"})
    stage.set_state(earlier, BackfillState.CANCELLED)
    started = stage.start(gallery_id, attempts=2)
    fail(stage, {"i2"})

    assert stage.row(started).failed == 0


def test_what_an_earlier_backfill_gave_up_is_planned_once(stage: Planning, clock: Clock) -> None:
    gallery_id = stage.gallery(4)
    earlier = stage.start(gallery_id)
    fail(stage, {"i2"}, retry=False)
    assert stage.finish(earlier) is BackfillState.DONE
    stage.store(gallery_id, ["i2", "new"])
    started = stage.start(gallery_id)
    fail(stage, {"new"})
    stage.store(gallery_id, ["i2"])
    clock.now += 3

    assert stage.finish(started) is BackfillState.RUNNING
    assert stage.planned(started)[1:] == [["i2"], ["new"]]
    assert (stage.row(started).total, stage.row(started).failed) == (3, 0)


def test_the_cap_counts_an_item_once_however_often_it_is_tried(stage: Planning, clock: Clock) -> None:
    started = stage.start(stage.gallery(8), item_limit=4)
    fail(stage, {"i2"})
    clock.now += 3

    assert stage.finish(started) is BackfillState.RUNNING
    assert stage.planned(started)[1:] == [["i2"]]


def test_a_clock_that_was_set_back_does_not_make_an_item_rest_for_ever(stage: Planning, clock: Clock) -> None:
    started = stage.start(stage.gallery(4))
    fail(stage, {"i2"})
    clock.now -= 10_000

    assert stage.finish(started) is BackfillState.RUNNING
