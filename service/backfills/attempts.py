"""Attempts at items that a backfill could not move: why they failed, and when they are tried again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, and_, delete, insert, select, true, update

from service.backfills.outcome import Failed
from service.backfills.planner import MAX_PAUSE_SECONDS, Kind, Order, pause_is_over, waiting_items
from service.store.filtering import passing
from service.store.rows import BackfillRow
from service.store.sql_arrays import key_range, key_table
from service.store.sql_time import now
from service.store.tables import backfill, backfill_failure, item

PAUSE_SECONDS = 2.0
"""How long an item that failed waits before it is tried again; twice as long after each further failure."""
LOOK = 4096
"""Failures that are looked through at a time."""


class Again(NamedTuple):
    """What of some failures is tried again: the items' keys, and the last one looked at; None: there are no more."""

    keys: list[int]
    last: int | None


def note_failed(
    connection: Connection, backfill_id: int, item_ids: Sequence[int], failed: Sequence[Failed], most_attempts: int
) -> int:
    """Note what failed of a chunk's items, and when it is tried again; returns how many were given up.

    What was noted of the others is removed: they were moved, or changed meanwhile.
    """
    tried = _take_earlier_attempts(connection, backfill_id, item_ids)
    moment = connection.execute(select(now())).scalar_one()
    rows = []
    for f in failed:
        attempts = tried.get(f.item_id, 0) + 1
        final = not f.retry or attempts >= most_attempts
        rows.append(
            {
                "backfill_id": backfill_id,
                "item_id": f.item_id,
                "seq": f.seq,
                "reason": f.line,
                "code": f.code,
                "attempts": attempts,
                "final": final,
                "next_try": None if final else moment + pause_seconds(attempts),
                "at": moment,
            }
        )
    if rows:
        connection.execute(insert(backfill_failure), rows)
    return sum(bool(row["final"]) for row in rows)


def _take_earlier_attempts(connection: Connection, backfill_id: int, item_ids: Sequence[int]) -> dict[int, int]:
    """How often each of the chunk's items was tried before; what is noted about them is removed."""
    items = key_table(connection, item_ids)
    conditions = (backfill_failure.c.backfill_id == backfill_id, backfill_failure.c.item_id.in_(items.keys))
    noted = select(backfill_failure.c.item_id, backfill_failure.c.attempts).where(*conditions)
    tried = {row.item_id: row.attempts for row in connection.execute(noted)}
    if tried:
        connection.execute(delete(backfill_failure).where(*conditions))
    return tried


def pause_seconds(attempts: int) -> float:
    """How long an item rests after it failed so many times."""
    return float(min(PAUSE_SECONDS * 2.0 ** (attempts - 1), MAX_PAUSE_SECONDS))


def to_try_again(connection: Connection, job: BackfillRow, order: Order, after: int) -> Again:
    """Of the items that failed, the next behind this key: take those that are to be planned again.

    Those whose pause is over, and those that were given up and written since. One that needs no move any more is
    counted as skipped.
    """
    condition = backfill_failure.c.backfill_id == job.id
    keys = key_range(connection, backfill_failure.c.item_id, condition, LOOK, after)
    if not len(keys):
        return Again([], None)
    looked = and_(condition, backfill_failure.c.item_id.between(int(keys[0]), int(keys[-1])))
    due = set(connection.execute(select(backfill_failure.c.item_id).where(looked, pause_is_over())).scalars())
    changed = set(connection.execute(_written_anew().where(looked)).scalars())
    still = set(still_waiting(connection, job, order, due | changed))
    if gone := due - still:
        _forget(connection, job.id, gone)
        skipped = {"skipped": backfill.c.skipped + len(gone), "revision": backfill.c.revision + 1}
        connection.execute(update(backfill).where(backfill.c.id == job.id).values(skipped))
    connection.execute(update(backfill_failure).where(looked, pause_is_over()).values(next_try=None))
    if given_up := changed & still:
        # Still known as failed: whoever goes on with this sweep must not find them among what was never planned.
        again = (condition, backfill_failure.c.item_id.in_(key_table(connection, sorted(given_up)).keys))
        connection.execute(update(backfill_failure).where(*again).values(final=False, attempts=0))
        fewer = {"failed": backfill.c.failed - len(given_up)}
        connection.execute(update(backfill).where(backfill.c.id == job.id).values(fewer))
    return Again([*sorted(due & still), *sorted(given_up)], int(keys[-1]))


def still_waiting(connection: Connection, job: BackfillRow, order: Order, ids: Collection[int]) -> list[int]:
    """Those of some items that the backfill has to move."""
    if not ids:
        return []
    still = waiting_items(job.gallery_id, Kind(job.kind), job.version_id, order, job.origin)
    among = and_(item.c.id.in_(key_table(connection, sorted(ids)).keys), still)
    if job.filter is not None:
        return sorted(passing(connection, among, job.filter))
    return sorted(connection.execute(select(item.c.id).where(among)).scalars())


def _written_anew() -> Select[Any]:
    """SELECT of the items that were given up, and written since."""
    failed = select(item.c.id).join(backfill_failure, backfill_failure.c.item_id == item.c.id)
    return failed.where(backfill_failure.c.final == true(), backfill_failure.c.seq != item.c.seq)


def _forget(connection: Connection, backfill_id: int, ids: Collection[int]) -> None:
    keys = key_table(connection, sorted(ids)).keys
    conditions = (backfill_failure.c.backfill_id == backfill_id, backfill_failure.c.item_id.in_(keys))
    connection.execute(delete(backfill_failure).where(*conditions))
