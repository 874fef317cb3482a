"""Plan backfills (at their start, and when no chunk is left), end complete ones, and remove their chunks.

Workers without a chunk call `finish_or_replan`. The service plans new backfills by `Planner`, so that none waits for
workers that are busy with others.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from functools import partial

from sqlalchemy import delete, exists, func, select

from index.events import Event
from service.backfills.embedder import Embedder
from service.backfills.states import ACTIVE, BackfillState, drained
from service.backfills.supplied import SUPPLIED, count
from service.backfills.sweeps import (
    abandoned_sweeps,
    begin_next_sweep,
    continue_sweep,
    keeping_lease,
    release_sweep,
    take_sweep,
)
from service.backfills.uncertainties import uncertainties_of_job
from service.background import Background
from service.errors import UnknownGallery
from service.registry.placement import version_order_to
from service.registry.registry import Registry
from service.store.database.connections import Database
from service.store.galleries.ranges import KEYS_PER_RANGE
from service.store.outages import RecurringFaults
from service.store.rows import BackfillRow
from service.store.tables import backfill, backfill_chunk, item

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
"""How often the thread searches for abandoned sweeps and for chunks of ended backfills."""
CHUNKS_AT_ONCE = 1_000
"""Chunks removed in one transaction."""


def finish_or_replan(
    database: Database, registry: Registry, embedder: Embedder, stop: threading.Event
) -> dict[int, BackfillState]:
    """End each drained backfill, or plan its items that were written meanwhile or are to be retried, until `stop`.

    Returns:
        The state of each changed backfill; those `running` have new chunks.
    """
    with database.lookup() as connection:
        drained_ids = drained(connection)
    states = plan_abandoned(database, registry, embedder, stop)
    for backfill_id in drained_ids:
        if stop.is_set():
            break
        with database.write() as connection:
            job = begin_next_sweep(connection, backfill_id)
        if job is not None and (state := plan(database, registry, embedder, job, stop)) is not None:
            states[backfill_id] = state
    return states


def plan_abandoned(
    database: Database, registry: Registry, embedder: Embedder, stop: threading.Event
) -> dict[int, BackfillState]:
    """Continue abandoned sweeps; returns the state of each backfill whose planning ended."""
    with database.lookup() as connection:
        rows = abandoned_sweeps(connection)
    states = {}
    for row in rows:
        with database.write() as connection:
            job = take_sweep(connection, row)
        if job is not None and (state := plan(database, registry, embedder, job, stop)) is not None:
            states[job.id] = state
    return states


def plan(
    database: Database, registry: Registry, embedder: Embedder, job: BackfillRow, stop: threading.Event
) -> BackfillState | None:
    """Complete a backfill's sweep, whose lease the caller holds; returns as `continue_sweep`."""
    with keeping_lease(database, job), suppress(UnknownGallery):
        if job.kind == SUPPLIED:
            return count(database, job)
        uncertain = partial(uncertainties_of_job, database, registry, embedder, job)
        return continue_sweep(database, job, version_order_to(registry, job.version_id), uncertain, stop)
    return None


def remove_ended_chunks(database: Database, stop: threading.Event) -> None:
    """Remove the chunks of backfills that are done or cancelled, until `stop`."""
    left = exists().where(backfill_chunk.c.backfill_id == backfill.c.id)
    with database.lookup() as connection:
        ended = connection.execute(select(backfill.c.id).where(backfill.c.state.not_in(ACTIVE), left)).scalars().all()
    some = select(backfill_chunk.c.id).where(backfill_chunk.c.backfill_id.in_(ended)).limit(CHUNKS_AT_ONCE)
    removed = CHUNKS_AT_ONCE if ended else 0
    while removed == CHUNKS_AT_ONCE and not stop.is_set():
        with database.write() as connection:
            removed = connection.execute(delete(backfill_chunk).where(backfill_chunk.c.id.in_(some))).rowcount


class Planner(Background):
    """Plans new backfills: those of small galleries within the request that creates them, others on a thread."""

    def __init__(self, database: Database, registry: Registry, embedder: Embedder) -> None:
        super().__init__("planning")
        self._database, self._registry, self._embedder = database, registry, embedder
        self._errors = RecurringFaults(logger)
        self._due = threading.Event()

    def look(self) -> None:
        """Wake the thread to search for abandoned sweeps."""
        self._due.set()

    def plan(self, job: BackfillRow) -> None:
        """Plan a new backfill: of a small gallery now, else on the thread.

        A failure does not undo the backfill: the thread continues when the sweep's lease has expired.
        """
        if not self._is_small(job.gallery_id):
            with self._database.write() as connection:
                release_sweep(connection, job)
            self._due.set()
            return
        try:
            plan(self._database, self._registry, self._embedder, job, self._stop)
        except Exception:
            self._errors.log(Event("planning_failed"))

    def _is_small(self, gallery_id: int) -> bool:
        some = select(item.c.id).where(item.c.gallery_id == gallery_id).limit(KEYS_PER_RANGE + 1).subquery()
        with self._database.lookup() as connection:
            return int(connection.execute(select(func.count()).select_from(some)).scalar_one()) <= KEYS_PER_RANGE

    def _run(self) -> None:
        while not self._stop.is_set():
            planned = partial(plan_abandoned, self._database, self._registry, self._embedder, self._stop)
            self._errors.attempt(Event("planning_failed"), planned)
            # A new backfill or the end of the process interrupts it: both set `_due`.
            self._errors.attempt(Event("chunks_not_removed"), partial(remove_ended_chunks, self._database, self._due))
            self._due.wait(LOOK_SECONDS)
            self._due.clear()

    def _wake(self) -> None:
        self._due.set()
