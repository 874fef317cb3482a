"""Which items a backfill has to move, cut into chunks; planned again at its end, until none is left.

Every function runs in its caller's transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, Row, Select, and_, exists, false, func, insert, select, update

from index.ordering import Waiting, backfill_order
from index.version import EdgeKind
from service.repository import take_seq
from service.tables import backfill, backfill_chunk, backfill_failure, edge, embedding, item


class Kind(StrEnum):
    """Where a backfill takes the new embeddings from."""

    REENCODE = "reencode"
    TRANSFORM = "transform"


class State(StrEnum):
    """The life of a backfill."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"


ACTIVE = (State.RUNNING, State.PAUSED)


def _reencodes(version_id: int) -> ColumnElement[bool]:
    own = exists().where(
        embedding.c.item_id == item.c.id,
        embedding.c.version_id == version_id,
        embedding.c.origin.in_(("encoded", "supplied")),
    )
    return and_(item.c.blob.is_not(None), ~own)


def _transforms(version_id: int) -> ColumnElement[bool]:
    return item.c.active_id.in_(forward_from(version_id))


QUALIFIES: dict[Kind, Callable[[int], ColumnElement[bool]]] = {
    Kind.REENCODE: _reencodes,
    Kind.TRANSFORM: _transforms,
}
"""Which live items a backfill to this version could move."""


def forward_from(version_id: int) -> Select[int]:
    """SELECT of the ids of the versions from which an item edge leads to this one."""
    return select(edge.c.old_id).where(edge.c.new_id == version_id, edge.c.kind == EdgeKind.FORWARD.value)


def plan(connection: Connection, job: Row[Any]) -> int:
    """Cut what the backfill could move now, and has not failed to move, into chunks; returns the number of items."""
    failed = exists().where(backfill_failure.c.backfill_id == job.id, backfill_failure.c.item_id == item.c.id)
    waiting = select(item.c.id).where(
        item.c.gallery_id == job.gallery_id,
        item.c.deleted == false(),
        QUALIFIES[Kind(job.kind)](job.version_id),
        ~failed,
    )
    # Keys grow in the order items were first stored.
    ids = np.fromiter(connection.execute(waiting.order_by(item.c.id)).scalars(), np.int64)
    ordered = ids[backfill_order(job.item_order, Waiting(ids, seed=job.id))].tolist()
    numbered = select(func.coalesce(func.max(backfill_chunk.c.number), -1) + 1)
    first = connection.execute(numbered.where(backfill_chunk.c.backfill_id == job.id)).scalar_one()
    rows = [
        {
            "backfill_id": job.id,
            "number": first + n,
            "item_ids": ordered[start : start + job.chunk_size],
            "state": "todo",
        }
        for n, start in enumerate(range(0, len(ordered), job.chunk_size))
    ]
    if rows:
        connection.execute(insert(backfill_chunk), rows)
        connection.execute(
            update(backfill).where(backfill.c.id == job.id).values(total=backfill.c.total + len(ordered))
        )
    return len(ordered)


def drained(connection: Connection) -> list[int]:
    """The running backfills that have no chunk left to claim or to wait for."""
    left = exists().where(backfill_chunk.c.backfill_id == backfill.c.id, backfill_chunk.c.state.in_(("todo", "leased")))
    statement = select(backfill.c.id).where(backfill.c.state == State.RUNNING, ~left).order_by(backfill.c.id)
    return list(connection.execute(statement).scalars())


def finish_or_extend(connection: Connection, backfill_id: int) -> State | None:
    """End a drained backfill, or plan the items that came or changed while it ran.

    Returns:
        Its state now; None when there is nothing to do: another worker was faster, or it was deleted.
    """
    gallery_id = connection.execute(select(backfill.c.gallery_id).where(backfill.c.id == backfill_id)).scalar()
    if gallery_id is None:
        return None
    take_seq(connection, gallery_id, 0)
    if backfill_id not in drained(connection):
        return None
    job = connection.execute(select(backfill).where(backfill.c.id == backfill_id)).one()
    if plan(connection, job):
        return State.RUNNING
    ended = update(backfill).where(backfill.c.id == backfill_id, backfill.c.state == State.RUNNING)
    done = connection.execute(ended.values(state=State.DONE, finished=time.time())).rowcount
    return State.DONE if done else None
