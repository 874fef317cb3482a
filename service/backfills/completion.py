"""Backfills that have no chunk left: ended, or planned on. Whoever looks for work and finds none sees to it."""

from __future__ import annotations

from functools import partial

from service.backfills.embedder import Embedder
from service.backfills.orders import uncertain_of
from service.backfills.planner import BackfillState, drained, finish_or_extend
from service.registry.placement import order_to
from service.registry.registry import Registry
from service.store.database import Database


def finish_or_replan(database: Database, registry: Registry, embedder: Embedder) -> dict[int, BackfillState]:
    """End each drained backfill, or plan what came or changed while it ran, or is to be tried again.

    Returns:
        The state of each that was touched: `running` ones have new chunks.
    """
    with database.lookup() as connection:
        waiting = drained(connection)
    states = {}
    for backfill_id in waiting:
        with database.read() as connection:
            uncertain = uncertain_of(connection, registry, embedder, backfill_id)
        with database.write() as connection:
            state = finish_or_extend(connection, backfill_id, partial(order_to, registry), uncertain)
        if state is not None:  # or another worker was faster
            states[backfill_id] = state
    return states
