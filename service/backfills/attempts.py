"""Attempts at items that a backfill could not move: why they failed, and when they are tried again."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, select

from service.backfills.outcome import Failed
from service.backfills.planner import MAX_PAUSE_SECONDS
from service.store.sql_arrays import listed
from service.store.tables import backfill_failure

REASON_LENGTH = 1024
PAUSE_SECONDS = 2.0
"""How long an item that failed waits before it is tried again; twice as long after each further failure."""


def note_failed(
    connection: Connection, backfill_id: int, item_ids: Sequence[int], failed: Sequence[Failed], most_attempts: int
) -> int:
    """Note what failed of a chunk's items, and when it is tried again; returns how many were given up.

    What was noted of the others is removed: they were moved, or changed meanwhile.
    """
    tried = _take_earlier_attempts(connection, backfill_id, item_ids)
    now = time.time()
    rows = []
    for f in failed:
        attempts = tried.get(f.item_id, 0) + 1
        final = not f.retry or attempts >= most_attempts
        rows.append(
            {
                "backfill_id": backfill_id,
                "item_id": f.item_id,
                "seq": f.seq,
                "reason": f.reason[:REASON_LENGTH],
                "code": f.code,
                "attempts": attempts,
                "final": final,
                "next_try": None if final else now + pause_seconds(attempts),
                "at": now,
            }
        )
    if rows:
        connection.execute(insert(backfill_failure), rows)
    return sum(bool(row["final"]) for row in rows)


def _take_earlier_attempts(connection: Connection, backfill_id: int, item_ids: Sequence[int]) -> dict[int, int]:
    """How often each of the chunk's items was tried before; what is noted about them is removed."""
    items = listed(connection, item_ids)
    mine = (backfill_failure.c.backfill_id == backfill_id, backfill_failure.c.item_id.in_(items.keys))
    noted = select(backfill_failure.c.item_id, backfill_failure.c.attempts).where(*mine)
    tried = {row.item_id: row.attempts for row in connection.execute(noted)}
    if tried:
        connection.execute(delete(backfill_failure).where(*mine))
    return tried


def pause_seconds(attempts: int) -> float:
    """How long an item rests after it failed so many times."""
    return float(min(PAUSE_SECONDS * 2.0 ** (attempts - 1), MAX_PAUSE_SECONDS))
