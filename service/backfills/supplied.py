"""Backfills of kind `supplied`: nobody computes them, they wait until all items hold embeddings by their version.

They have no chunks. Each write of items says within its own transaction how many it changed that were waited for; the
last of them ends the backfill. Every function runs in its caller's transaction, with the lock of the gallery.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import ColumnElement, Connection, and_, false, func, select, update

from index.item_id import is_writable
from service.backfills.planner import ACTIVE, BackfillState, turn
from service.store.embeddings import says_itself
from service.store.rows import BackfillRow, first_of, one_of
from service.store.sql_arrays import texts
from service.store.tables import backfill, item

SUPPLIED = "supplied"


def missing_items(gallery_id: int, version_id: int) -> ColumnElement[bool]:
    """Which rows of `item` hold no embedding that the version itself made."""
    return and_(item.c.gallery_id == gallery_id, item.c.deleted == false(), ~says_itself(version_id))


def count_missing(connection: Connection, gallery_id: int, version_id: int) -> int:
    """How many items are waited for; it looks at every item."""
    counted = select(func.count()).select_from(item).where(missing_items(gallery_id, version_id))
    return int(connection.execute(counted).scalar_one())


def settle(connection: Connection, number: int) -> None:
    """Count anew what a backfill of this kind waits for, and end it if that is nothing and it is not paused."""
    job = one_of(BackfillRow, connection.execute(select(backfill).where(backfill.c.id == number)))
    missing = count_missing(connection, job.gallery_id, job.version_id)
    # What came is done; what came in without an embedding by the version makes it more.
    total = max(job.total, job.settled + missing)
    values = {"total": total, "done": total - job.skipped - missing, "revision": backfill.c.revision + 1}
    connection.execute(update(backfill).where(backfill.c.id == number).values(values))
    if not missing:
        turn(connection, number, (BackfillState.RUNNING,), BackfillState.DONE)


@contextmanager
def counting(
    connection: Connection, gallery_id: int, external_ids: Sequence[str], counter: str = "done"
) -> Iterator[None]:
    """Around a write of these items, in a transaction that holds the gallery's lock.

    `counter`: where those are counted that are waited for no more: `done`, or `skipped` where they are deleted.
    """
    mine = (backfill.c.gallery_id == gallery_id, backfill.c.kind == SUPPLIED, backfill.c.state.in_(ACTIVE))
    job = first_of(BackfillRow, connection.execute(select(backfill).where(*mine)))
    if job is None:
        yield
        return
    before = _missing_of(connection, job, external_ids)
    yield
    came = before - _missing_of(connection, job, external_ids)
    if not came:
        return
    grown = {counter: backfill.c[counter] + came} if came > 0 else {"total": backfill.c.total - came}
    values = {**grown, "revision": backfill.c.revision + 1}
    connection.execute(update(backfill).where(backfill.c.id == job.id).values(values))
    if came > 0 and job.settled + came >= job.total:
        settle(connection, job.id)


def _missing_of(connection: Connection, job: BackfillRow, external_ids: Sequence[str]) -> int:
    ids = [external_id for external_id in external_ids if is_writable(external_id)]
    among = and_(missing_items(job.gallery_id, job.version_id), item.c.external_id.in_(texts(connection, ids)))
    return int(connection.execute(select(func.count()).select_from(item).where(among)).scalar_one())
