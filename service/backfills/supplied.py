"""Backfills of kind `supplied`: they wait until clients have sent embeddings of all items by the target version.

They have no chunks. Once the backfill is committed, each write of items counts, in its transaction, the items that are
no longer waited for (`tracking_supplied`); the last one ends the backfill. The total is counted once, concurrently with
writes, in a snapshot that also holds these counters, so that both stay consistent (`count`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, false, func, select, update

from index.item_id import is_writable
from service.backfills.states import ACTIVE, BackfillState, change_state
from service.store.database.connections import Database
from service.store.galleries.embeddings import has_own_embedding
from service.store.galleries.gallery import take_seq
from service.store.rows import BackfillRow, first_of
from service.store.sql.arrays import texts
from service.store.tables import backfill, item

SUPPLIED = "supplied"


def missing_items(gallery_id: int, version_id: int) -> ColumnElement[bool]:
    """Which rows of `item` hold no embedding that the version itself made."""
    return and_(item.c.gallery_id == gallery_id, item.c.deleted == false(), ~has_own_embedding(version_id))


def count_missing(connection: Connection, gallery_id: int, version_id: int) -> int:
    """How many items are waited for; reads every item."""
    counted = select(func.count()).select_from(item).where(missing_items(gallery_id, version_id))
    return int(connection.execute(counted).scalar_one())


def count(database: Database, job: BackfillRow) -> BackfillState | None:
    """Count the items that a new backfill of this kind waits for, and end it if there are none.

    Returns:
        Its state; None: another process has counted, or it was cancelled or deleted meanwhile.
    """
    with database.read() as connection:
        row_before = first_of(BackfillRow, connection.execute(select(backfill).where(backfill.c.id == job.id)))
        if row_before is None:
            return None
        missing = row_before.settled + count_missing(connection, job.gallery_id, job.version_id) - row_before.total
    uncounted = (backfill.c.id == job.id, backfill.c.sweep_seq == job.sweep_seq, backfill.c.state.in_(ACTIVE))
    values = {"total": backfill.c.total + missing, "sweep_seq": None, "sweep_until": None}
    with database.write() as connection:
        take_seq(connection, job.gallery_id, 0)
        row = _update(connection, values, *uncounted)
        if row is None:
            return None
        return BackfillState.DONE if finish_if_complete(connection, row) else BackfillState(row.state)


def finish_if_complete(connection: Connection, job: BackfillRow) -> bool:
    """End a backfill of this kind if no item is waited for and it is not paused; returns whether it did."""
    if job.sweep_seq is not None or job.settled < job.total:
        return False
    return change_state(connection, job.id, (BackfillState.RUNNING,), BackfillState.DONE)


@contextmanager
def tracking_supplied(
    connection: Connection, gallery_id: int, external_ids: Sequence[str], counter: str = "done"
) -> Iterator[None]:
    """Context of a write of these items, which updates the backfill; the transaction holds the gallery's lock.

    `counter`: the column that counts items no longer waited for: `done`, or `skipped` if they are deleted.
    """
    conditions = (backfill.c.gallery_id == gallery_id, backfill.c.kind == SUPPLIED, backfill.c.state.in_(ACTIVE))
    job = first_of(BackfillRow, connection.execute(select(backfill).where(*conditions)))
    if job is None:
        yield
        return
    before = _missing_of(connection, job, external_ids)
    yield
    supplied = before - _missing_of(connection, job, external_ids)
    if not supplied:
        return
    values = {counter: backfill.c[counter] + supplied} if supplied > 0 else {"total": backfill.c.total - supplied}
    row = _update(connection, values, backfill.c.id == job.id)
    if row is not None:
        finish_if_complete(connection, row)


def _update(connection: Connection, values: dict[str, Any], *which: ColumnElement[bool]) -> BackfillRow | None:
    changed = update(backfill).where(*which).values(revision=backfill.c.revision + 1, **values)
    return first_of(BackfillRow, connection.execute(changed.returning(backfill)))


def _missing_of(connection: Connection, job: BackfillRow, external_ids: Sequence[str]) -> int:
    ids = [external_id for external_id in external_ids if is_writable(external_id)]
    condition = and_(missing_items(job.gallery_id, job.version_id), item.c.external_id.in_(texts(connection, ids)))
    return int(connection.execute(select(func.count()).select_from(item).where(condition)).scalar_one())
