"""Clocks that jump, backwards and forwards: leases, rates, pauses, and the time left."""

from __future__ import annotations

import math
import time as real
from itertools import count
from typing import Any

import pytest
from sqlalchemy import select, update

from regraft.models import BackfillInfo
from service.backfills import attempts, leasing, states
from service.backfills.records import backfill_row
from service.http.backfills import progress
from service.store.leases import jobs
from service.store.leases.jobs import MAX_LEASES_AHEAD
from service.store.sql import database_clock
from service.store.tables import backfill, backfill_chunk, backfill_failure, item
from staging.states.working import SteppedWorker, work

V2 = 2
DAY = 86_400.0


class Clock:
    """A clock that jumps, and else goes on by a millisecond when it is read, so that no lease ends because a machine
    is slow; intervals (`monotonic`) see neither."""

    def __init__(self) -> None:
        self.jump = 0.0
        self._ticks = count(real.time(), 0.001)

    def time(self) -> float:
        return next(self._ticks) + self.jump

    monotonic = staticmethod(real.monotonic)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(database_clock, "time", made)
    return made


@pytest.mark.parametrize("jump", [-DAY, -3600.0, DAY], ids=["a day back", "an hour back", "a day on"])
def test_the_chunks_of_a_dead_worker_are_taken_over(site: Any, clock: Clock, jump: float) -> None:
    killed, undisturbed = site.start_backfill("g"), site.start_backfill("h")
    for _ in range(3):
        with site.database.write() as connection:
            assert leasing.claim(connection, "dead", site.settings.lease_seconds) is not None

    clock.jump = jump
    site.work()

    assert site.state("g") == site.state("h")
    for number in (killed, undisturbed):
        row = site.backfill(number)
        assert (row.state, row.done, row.skipped, row.failed) == ("done", 48, 0, 0)


@pytest.mark.parametrize("jump", [-DAY, DAY], ids=["back", "on"])
def test_a_jump_while_a_chunk_is_computed_moves_no_item_twice_and_loses_none(
    site: Any, clock: Clock, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = site.start_backfill("g")
    slow = SteppedWorker(site.settings)
    persist = slow._persist

    def jumped(chunk: Any, outcome: Any) -> Any:
        monkeypatch.setattr(slow, "_persist", persist)
        slow._leases.drop(chunk)  # it sends no heartbeat from here on
        clock.jump += jump
        site.work()
        return persist(chunk, outcome)

    monkeypatch.setattr(slow, "_persist", jumped)
    slow.step()
    slow.close()

    row = site.backfill(number)
    assert (row.state, row.total, row.done, row.skipped, row.failed) == ("done", 48, 48, 0, 0)
    assert site.mix("g") == {V2: 48}


@pytest.mark.parametrize("jump", [-DAY, DAY], ids=["back", "on"])
def test_a_rate_is_kept_whatever_the_clock_does(site: Any, clock: Clock, jump: float) -> None:
    """At 12 items a second in chunks of 6 a jump gives away no more than a second's worth."""
    site.start_backfill("g", rate=12)
    claimed: list[float] = []

    def claim() -> bool:
        with site.database.write() as connection:
            chunk = leasing.claim(connection, "w", 30.0)
        claimed.extend([clock.time()] * (chunk is not None))
        return chunk is not None

    while claim():
        pass
    before = len(claimed)
    clock.jump += jump
    while claim():
        pass
    at_once = len(claimed) - before
    clock.jump += 5.0
    while claim():
        pass

    assert at_once <= (1.0 * 12) / 6 + 1
    assert len(claimed) - before - at_once >= 1


@pytest.mark.parametrize("jump", [-DAY, DAY], ids=["back", "on"])
def test_an_item_that_failed_is_tried_again_at_once_and_not_never(
    site: Any, clock: Clock, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "PAUSE_SECONDS", 100.0)
    number = site.start_backfill("g")
    with site.database.read() as connection:
        broken = connection.execute(select(item.c.blob).where(item.c.external_id == "i7").order_by(item.c.id)).scalar()
    read, failures = worker_reads(), iter([True])

    def once(self: Any, key: str) -> bytes:
        if key == broken and next(failures, None):
            raise OSError("Input/output error")
        return read(self, key)

    monkeypatch.setattr("service.store.image_store.blobs.Blobs.read", once)
    work(site.settings)
    with site.database.lookup() as connection:
        assert connection.execute(select(backfill_failure.c.attempts)).scalar_one() == 1
    assert site.backfill(number).state == "running"

    clock.jump = jump
    site.work()

    row = site.backfill(number)
    assert (row.state, row.done, row.failed) == ("done", 48, 0)


def worker_reads() -> Any:
    from service.store.image_store.blobs import Blobs

    return Blobs.read


@pytest.mark.parametrize("jump", [-DAY, -1.0, DAY])
def test_the_time_left_and_the_speed_are_numbers_and_not_negative(site: Any, clock: Clock, jump: float) -> None:
    number = site.start_backfill("g")
    worker = SteppedWorker(site.settings)
    worker.step(3)
    worker.close()

    clock.jump = jump
    running = described(site, number)
    with site.database.write() as connection:
        states.change_state(connection, number, (states.BackfillState.RUNNING,), states.BackfillState.PAUSED)
    paused = described(site, number)
    with site.database.write() as connection:
        states.change_state(connection, number, (states.BackfillState.PAUSED,), states.BackfillState.RUNNING)
    clock.jump = 0.0
    resumed = described(site, number)

    for shown in (running, paused, resumed):
        assert shown.active_seconds >= 0
        assert shown.remaining == 30
        for value in (shown.eta_seconds, shown.items_per_second):
            assert value is None or (value >= 0 and math.isfinite(value))
    assert paused.eta_seconds is None
    site.work()
    assert site.backfill(number).state == "done"


def test_the_speed_is_by_the_databases_clock(site: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    number = site.start_backfill("g")
    worker = SteppedWorker(site.settings)
    worker.step(3)
    worker.close()
    monkeypatch.setattr(real, "time", lambda: clock.time() + DAY)

    assert described(site, number).active_seconds < DAY


def described(site: Any, number: int) -> BackfillInfo:
    from service.registry.registry import Registry

    with site.database.read() as connection:
        row = backfill_row(connection, number)
        return progress.describe(Registry(site.database, site.settings), "g", row, None)


LEASE = 120.0
"""Long enough that what a lease may lie ahead counts in leases, and not in the pauses of failed items."""


@pytest.mark.parametrize(
    ("jump", "outcome"),
    [
        (0.0, "left alone"),
        (-LEASE / 2, "left alone"),
        (LEASE / 2, "left alone"),
        (-(MAX_LEASES_AHEAD - 2) * LEASE, "left alone"),
        (LEASE + 1.0, "taken over"),
        ((MAX_LEASES_AHEAD + 1) * LEASE, "taken over"),
        (-MAX_LEASES_AHEAD * LEASE, "taken over"),
    ],
)
def test_a_lease_is_taken_over_once_the_clock_says_that_it_ended_or_cannot_be(
    site: Any, clock: Clock, jump: float, outcome: str
) -> None:
    assert MAX_LEASES_AHEAD * LEASE > states.MAX_PAUSE_SECONDS
    site.start_backfill("g")
    with site.database.write() as connection:
        held = leasing.claim(connection, "a", LEASE)
        connection.execute(update(backfill).values(chunk_size=6))
    assert held is not None

    clock.jump = jump
    with site.database.write() as connection:
        taken = [leasing.claim(connection, "b", LEASE) for _ in range(8)]

    found = "taken over" if held.id in {chunk.id for chunk in taken if chunk is not None} else "left alone"
    assert found == outcome
    with site.database.lookup() as connection:
        mine = select(backfill_chunk.c.lease_owner).where(backfill_chunk.c.id == held.id)
        assert connection.execute(mine).scalar_one() == ("b" if outcome == "taken over" else "a")


@pytest.mark.parametrize(
    ("jump", "taken"), [(0.0, False), (-LEASE / 2, False), (LEASE / 2, False), (LEASE + 1.0, True), (-DAY, True)]
)
def test_a_job_of_a_dead_process_is_taken_over_though_its_clock_was_ahead(
    site: Any, clock: Clock, jump: float, taken: bool
) -> None:
    with site.database.write() as connection:
        assert jobs.acquire_job(connection, "a job", "dead", LEASE)

    clock.jump = jump

    with site.database.write() as connection:
        assert jobs.acquire_job(connection, "a job", "alive", LEASE) == taken
