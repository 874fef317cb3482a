"""Items that a backfill could not move: `record_failures` stores why, `next_retries` plans them again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, and_, delete, insert, select, true, update

from service.backfills.outcome import Failed
from service.backfills.states import MAX_PAUSE_SECONDS, Kind, pause_is_over
from service.backfills.waiting import VersionOrder, waiting_items
from service.store.galleries.filtering import passing
from service.store.rows import BackfillRow
from service.store.sql.arrays import key_range, key_table
from service.store.sql.database_clock import now
from service.store.tables import backfill, backfill_failure, item

PAUSE_SECONDS = 2.0
"""The pause before a failed item is retried; doubled by each further failure."""
BLOCK = 4096
"""Failures read at a time."""


class Retries(NamedTuple):
    """Keys of the items to retry in a block of failures, and the block's last key; None: there are no more blocks."""

    keys: list[int]
    last: int | None


def record_failures(
    connection: Connection, backfill_id: int, item_ids: Sequence[int], failed: Sequence[Failed], max_attempts: int
) -> int:
    """Record the failed items of a chunk, and when they are retried; returns how many were given up.

    Records of the chunk's other items are removed: they were moved, or changed meanwhile.
    """
    earlier_attempts = _take_earlier_attempts(connection, backfill_id, item_ids)
    if not failed:
        return 0
    time_now = connection.execute(select(now())).scalar_one()
    rows = []
    for f in failed:
        attempts = earlier_attempts.get(f.item_id, 0) + 1
        final = not f.retry or attempts >= max_attempts
        rows.append(
            {
                "backfill_id": backfill_id,
                "item_id": f.item_id,
                "seq": f.seq,
                "reason": f.line,
                "code": f.code,
                "attempts": attempts,
                "final": final,
                "next_try": None if final else time_now + pause_seconds(attempts),
                "at": time_now,
            }
        )
    connection.execute(insert(backfill_failure), rows)
    return sum(bool(row["final"]) for row in rows)


def _take_earlier_attempts(connection: Connection, backfill_id: int, item_ids: Sequence[int]) -> dict[int, int]:
    """Remove the failures recorded for the chunk's items; returns the attempts of each item."""
    items = key_table(connection, item_ids)
    conditions = (backfill_failure.c.backfill_id == backfill_id, backfill_failure.c.item_id.in_(items.keys))
    noted = select(backfill_failure.c.item_id, backfill_failure.c.attempts).where(*conditions)
    tried = {row.item_id: row.attempts for row in connection.execute(noted)}
    if tried:
        connection.execute(delete(backfill_failure).where(*conditions))
    return tried


def pause_seconds(attempts: int) -> float:
    """The pause before an item is retried after so many failures."""
    return float(min(PAUSE_SECONDS * 2.0 ** (attempts - 1), MAX_PAUSE_SECONDS))


def next_retries(connection: Connection, job: BackfillRow, version_order: VersionOrder, after: int) -> Retries:
    """The failed items to plan again, from the next block of failures after key `after`.

    These are items whose pause is over, and items that were given up and written since. An item whose pause is over and
    that no longer has to be moved is counted as skipped.
    """
    condition = backfill_failure.c.backfill_id == job.id
    keys = key_range(connection, backfill_failure.c.item_id, condition, BLOCK, after)
    if not len(keys):
        return Retries([], None)
    in_block = and_(condition, backfill_failure.c.item_id.between(int(keys[0]), int(keys[-1])))
    due = set(connection.execute(select(backfill_failure.c.item_id).where(in_block, pause_is_over())).scalars())
    changed = set(connection.execute(_written_since_given_up().where(in_block)).scalars())
    waiting = set(items_to_move(connection, job, version_order, due | changed))
    if obsolete := due - waiting:
        _forget(connection, job.id, obsolete)
        skipped = {"skipped": backfill.c.skipped + len(obsolete), "revision": backfill.c.revision + 1}
        connection.execute(update(backfill).where(backfill.c.id == job.id).values(skipped))
    connection.execute(update(backfill_failure).where(in_block, pause_is_over()).values(next_try=None))
    if given_up := changed & waiting:
        # They stay recorded as failed, so that another process of this sweep does not plan them as new.
        retried = (condition, backfill_failure.c.item_id.in_(key_table(connection, sorted(given_up)).keys))
        connection.execute(update(backfill_failure).where(*retried).values(final=False, attempts=0))
        values = {"failed": backfill.c.failed - len(given_up)}
        connection.execute(update(backfill).where(backfill.c.id == job.id).values(values))
    return Retries([*sorted(due & waiting), *sorted(given_up)], int(keys[-1]))


def items_to_move(
    connection: Connection, job: BackfillRow, version_order: VersionOrder, ids: Collection[int]
) -> list[int]:
    """The keys among `ids` of items that the backfill still has to move, ascending."""
    if not ids:
        return []
    still = waiting_items(job.gallery_id, Kind(job.kind), job.version_id, version_order, job.origin)
    among = and_(item.c.id.in_(key_table(connection, sorted(ids)).keys), still)
    if job.filter is not None:
        return sorted(passing(connection, among, job.filter))
    return sorted(connection.execute(select(item.c.id).where(among)).scalars())


def _written_since_given_up() -> Select[Any]:
    """SELECT of the items that were given up and written since."""
    failed = select(item.c.id).join(backfill_failure, backfill_failure.c.item_id == item.c.id)
    return failed.where(backfill_failure.c.final == true(), backfill_failure.c.seq != item.c.seq)


def _forget(connection: Connection, backfill_id: int, ids: Collection[int]) -> None:
    keys = key_table(connection, sorted(ids)).keys
    conditions = (backfill_failure.c.backfill_id == backfill_id, backfill_failure.c.item_id.in_(keys))
    connection.execute(delete(backfill_failure).where(*conditions))
