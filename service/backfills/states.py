"""The kinds and states of backfills: change a state, and find those of which no chunk is left.

Most functions run in their caller's transaction; the others return SQL conditions and expressions.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from sqlalchemy import ColumnElement, Connection, and_, case, exists, func, null, or_, select, update

from service.store.sql.database_clock import now
from service.store.tables import backfill, backfill_chunk, backfill_failure

MAX_PAUSE_SECONDS = 300.0
"""The longest pause before a failed item is retried; a retry further ahead means that the clock was set back."""


class Kind(StrEnum):
    """Backfills that workers compute, by their input; for those they do not, see `service.backfills.supplied`."""

    REENCODE = "reencode"
    TRANSFORM = "transform"


class BackfillState(StrEnum):
    """The states of a backfill."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"


ACTIVE = (BackfillState.RUNNING, BackfillState.PAUSED)


def running_seconds() -> ColumnElement[float]:
    """Seconds that a row of `backfill` has been running since it started or resumed; negative if a clock went back."""
    return func.coalesce(now() - backfill.c.resumed, 0.0)


def pause_is_over() -> ColumnElement[bool]:
    """Whether a row of `backfill_failure` is due for a retry."""
    return or_(backfill_failure.c.next_try <= now(), backfill_failure.c.next_try > now() + MAX_PAUSE_SECONDS)


def drained(connection: Connection) -> list[int]:
    """The running backfills that are planned completely, without an unfinished chunk or an item in a pause."""
    unfinished = exists().where(
        backfill_chunk.c.backfill_id == backfill.c.id, backfill_chunk.c.state.in_(("todo", "leased"))
    )
    paused = exists().where(
        backfill_failure.c.backfill_id == backfill.c.id, backfill_failure.c.next_try.is_not(None), ~pause_is_over()
    )
    conditions = (
        backfill.c.state == BackfillState.RUNNING,
        backfill.c.kind.in_(tuple(Kind)),
        backfill.c.sweep_seq.is_(None),
    )
    statement = select(backfill.c.id).where(*conditions, ~unfinished, ~paused)
    return list(connection.execute(statement.order_by(backfill.c.id)).scalars())


def change_state(
    connection: Connection, backfill_id: int, before: Sequence[BackfillState], after: BackfillState
) -> bool:
    """Change a backfill's state from one of `before` to `after` and update its running time; False: it had another."""
    planning = and_(backfill.c.sweep_seq.is_not(None), backfill.c.kind.in_(tuple(Kind)))
    ran = backfill.c.active_seconds + running_seconds()
    values = {
        "state": after,
        "revision": backfill.c.revision + 1,
        # A clock that was set back must not reduce the time.
        "active_seconds": case((ran > backfill.c.active_seconds, ran), else_=backfill.c.active_seconds),
        # A backfill with chunks runs from the end of its planning.
        "resumed": case((planning, null()), else_=now()) if after is BackfillState.RUNNING else None,
        "sweep_until": None,  # its planner stops: after a pause any process may continue at once
        "finished": None if after in ACTIVE else now(),
    }
    statement = update(backfill).where(backfill.c.id == backfill_id, backfill.c.state.in_(before))
    return connection.execute(statement.values(values)).rowcount == 1


def cancel_backfills(connection: Connection, gallery_id: int, current_id: int) -> int:
    """Cancel the gallery's active backfills to versions other than `current_id`; returns how many."""
    conditions = (
        backfill.c.gallery_id == gallery_id,
        backfill.c.version_id != current_id,
        backfill.c.state.in_(ACTIVE),
    )
    active = connection.execute(select(backfill.c.id).where(*conditions)).scalars().all()
    return sum(change_state(connection, backfill_id, ACTIVE, BackfillState.CANCELLED) for backfill_id in active)
