"""Workers that die of an item: what they held is done by others, and that item is given up."""

from __future__ import annotations

from itertools import count

import pytest
from sqlalchemy import select

from service.backfills import attempts, leasing
from service.backfills.chunks import Chunk
from service.backfills.states import BackfillState
from service.store.galleries.items import delete_items
from service.store.tables import backfill_chunk, backfill_failure
from staging.states.plans import LEASE, V2, Clock, Planning


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSE_SECONDS", 0.0)


def held(stage: Planning, owner: str, most: int) -> list[Chunk]:
    claimed = (stage.claim(f"{owner}:{number}" if owner.startswith("remote:") else owner) for number in range(most))
    return [chunk for chunk in claimed if chunk is not None]


def failures(stage: Planning) -> list[tuple[str, int, bool]]:
    columns = (backfill_failure.c.code, backfill_failure.c.attempts, backfill_failure.c.final)
    with stage.database.lookup() as connection:
        return [tuple(row) for row in connection.execute(select(*columns).order_by(backfill_failure.c.item_id))]


@pytest.mark.parametrize("worker", ["local", "remote:far"])
@pytest.mark.parametrize("ahead", [0, 2], ids=["one chunk", "reading two ahead"])
def test_an_item_that_kills_each_worker_is_given_up_and_all_others_are_moved(
    stage: Planning, clock: Clock, worker: str, ahead: int
) -> None:
    gallery_id = stage.gallery(32)
    started = stage.start(gallery_id, chunk_size=8)
    deadly, deaths = stage.items(gallery_id)["i13"].id, 0

    for number in count():
        mine = held(stage, f"{worker}{number}", 1)
        if not mine:
            if stage.finish(started) is BackfillState.DONE:
                break
            continue
        if deadly in mine[0].item_ids:
            held(stage, f"{worker}{number}", ahead)
            deaths += 1
            clock.now += LEASE + 1
        else:
            stage.commit(mine[0], stage.read(mine[0]))

    row = stage.row(started)
    assert (row.total, row.done, row.skipped, row.failed) == (32, 31, 0, 1)
    assert failures(stage) == [("worker_died", 3, True)]
    assert set(stage.origins(gallery_id, V2)) == {f"i{n}" for n in range(32) if n != 13}
    assert deaths < 12


def test_of_several_items_that_a_worker_had_none_is_at_fault_until_it_is_alone(stage: Planning, clock: Clock) -> None:
    started = stage.start(stage.gallery(2), chunk_size=1)
    first = [chunk.item_ids for chunk in held(stage, "a", 2)]
    clock.now += LEASE + 1

    again = [chunk.item_ids for chunk in held(stage, "b", 2)]

    assert again == first[::-1]
    assert (failures(stage), stage.row(started).failed) == ([], 0)


def test_a_worker_that_still_gives_signs_has_lost_nothing_that_another_chunk_of_it_may_be_at_fault_for(
    stage: Planning, clock: Clock
) -> None:
    stage.start(stage.gallery(2), chunk_size=1)
    held(stage, "a", 1)
    clock.now += 1
    held(stage, "a", 1)
    clock.now += LEASE - 0.5

    assert stage.claim("b") is None  # the lease of the second has not run out
    clock.now += 1

    assert len(held(stage, "b", 2)) == 2
    assert failures(stage) == []


def test_a_remote_worker_that_lives_says_nothing_of_another(stage: Planning, clock: Clock) -> None:
    stage.start(stage.gallery(8))
    (lost,) = held(stage, "remote:a", 1)
    clock.now += LEASE - 1
    assert held(stage, "remote:b", 1)
    clock.now += 2

    taken = stage.claim("c")

    assert taken
    assert taken.item_ids == lost.item_ids[:2]


def test_a_chunk_that_its_worker_forgot_is_free_after_another_lease(stage: Planning, clock: Clock) -> None:
    stage.start(stage.gallery(8))
    forgotten, kept = held(stage, "a", 2)
    clock.now += LEASE - 1
    with stage.database.write() as connection:
        assert leasing.extend(connection, kept, 10 * LEASE)
    clock.now += 2
    assert stage.claim("b") is None
    clock.now += LEASE

    taken = stage.claim("b")

    assert taken
    assert (taken.id, taken.item_ids) == (forgotten.id, forgotten.item_ids[:2])


def test_a_lease_that_cannot_be_says_nothing_of_its_worker(stage: Planning, clock: Clock) -> None:
    stage.start(stage.gallery(4))
    (chunk,) = held(stage, "a", 1)
    clock.now -= 1000

    taken = stage.claim("b")

    assert taken
    assert taken.item_ids == chunk.item_ids


def test_an_item_that_was_deleted_meanwhile_is_skipped(stage: Planning, clock: Clock) -> None:
    gallery_id = stage.gallery(1)
    started = stage.start(gallery_id)
    held(stage, "a", 1)
    with stage.database.write() as connection:
        delete_items(connection, gallery_id, ["i0"])
    clock.now += LEASE + 1

    assert stage.claim("b") is None

    assert (stage.row(started).skipped, failures(stage)) == (1, [])
    assert stage.finish(started) is BackfillState.DONE


def test_chunks_that_were_left_are_whole(stage: Planning, clock: Clock) -> None:
    stage.start(stage.gallery(4))
    (chunk,) = held(stage, "a", 1)
    with stage.database.write() as connection:
        leasing.abandon(connection, chunk)
        owners = select(backfill_chunk.c.lease_owner).where(backfill_chunk.c.id == chunk.id)
        assert connection.execute(owners).scalar_one() is None
    clock.now += LEASE + 1

    taken = stage.claim("b")

    assert taken
    assert taken.item_ids == chunk.item_ids
