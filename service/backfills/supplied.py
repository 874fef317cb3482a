"""Backfills of kind `supplied`: nobody computes them, they wait until all items hold embeddings by their version.

They have no chunks. Each write of items says within its own transaction how many it changed that were waited for, from
the transaction on that makes the backfill; the last of them ends it. How many there were is counted once, beside
writes: of what the counters say at the moment that is counted, it tells what they lack, and so ever after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, false, func, select, update

from index.item_id import is_writable
from service.backfills.planner import ACTIVE, BackfillState, turn
from service.store.database import Database
from service.store.embeddings import has_own_embedding
from service.store.repository import take_seq
from service.store.rows import BackfillRow, first_of
from service.store.sql_arrays import texts
from service.store.tables import backfill, item

SUPPLIED = "supplied"


def missing_items(gallery_id: int, version_id: int) -> ColumnElement[bool]:
    """Which rows of `item` hold no embedding that the version itself made."""
    return and_(item.c.gallery_id == gallery_id, item.c.deleted == false(), ~has_own_embedding(version_id))


def count_missing(connection: Connection, gallery_id: int, version_id: int) -> int:
    """How many items are waited for; it looks at every item."""
    counted = select(func.count()).select_from(item).where(missing_items(gallery_id, version_id))
    return int(connection.execute(counted).scalar_one())


def count(database: Database, job: BackfillRow) -> BackfillState | None:
    """Count what a new backfill of this kind waits for, and end it if that is nothing.

    Returns:
        Its state; None: another process has counted, or it was cancelled or deleted meanwhile.
    """
    with database.read() as connection:
        seen = first_of(BackfillRow, connection.execute(select(backfill).where(backfill.c.id == job.id)))
        if seen is None:
            return None
        lacking = seen.settled + count_missing(connection, job.gallery_id, job.version_id) - seen.total
    uncounted = (backfill.c.id == job.id, backfill.c.sweep_seq == job.sweep_seq, backfill.c.state.in_(ACTIVE))
    known = {"total": backfill.c.total + lacking, "sweep_seq": None, "sweep_until": None}
    with database.write() as connection:
        take_seq(connection, job.gallery_id, 0)
        row = _changed(connection, known, *uncounted)
        if row is None:
            return None
        return BackfillState.DONE if end_if_all_came(connection, row) else BackfillState(row.state)


def end_if_all_came(connection: Connection, job: BackfillRow) -> bool:
    """End a backfill of this kind if nothing is waited for and it is not paused; whether it did."""
    if job.sweep_seq is not None or job.settled < job.total:
        return False
    return turn(connection, job.id, (BackfillState.RUNNING,), BackfillState.DONE)


@contextmanager
def counting(
    connection: Connection, gallery_id: int, external_ids: Sequence[str], counter: str = "done"
) -> Iterator[None]:
    """Around a write of these items, in a transaction that holds the gallery's lock.

    `counter`: where those are counted that are waited for no more: `done`, or `skipped` where they are deleted.
    """
    conditions = (backfill.c.gallery_id == gallery_id, backfill.c.kind == SUPPLIED, backfill.c.state.in_(ACTIVE))
    job = first_of(BackfillRow, connection.execute(select(backfill).where(*conditions)))
    if job is None:
        yield
        return
    before = _missing_of(connection, job, external_ids)
    yield
    came = before - _missing_of(connection, job, external_ids)
    if not came:
        return
    grown = {counter: backfill.c[counter] + came} if came > 0 else {"total": backfill.c.total - came}
    row = _changed(connection, grown, backfill.c.id == job.id)
    if row is not None:
        end_if_all_came(connection, row)


def _changed(connection: Connection, values: dict[str, Any], *which: ColumnElement[bool]) -> BackfillRow | None:
    changed = update(backfill).where(*which).values(revision=backfill.c.revision + 1, **values)
    return first_of(BackfillRow, connection.execute(changed.returning(backfill)))


def _missing_of(connection: Connection, job: BackfillRow, external_ids: Sequence[str]) -> int:
    ids = [external_id for external_id in external_ids if is_writable(external_id)]
    among = and_(missing_items(job.gallery_id, job.version_id), item.c.external_id.in_(texts(connection, ids)))
    return int(connection.execute(select(func.count()).select_from(item).where(among)).scalar_one())
