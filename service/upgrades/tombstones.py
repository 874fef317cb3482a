"""Remove tombstones, the rows of deleted items, once every process that follows the change feed has seen them.

`purge` stores the position of a gallery's feed. A day later it removes the tombstones up to that position and sets
`gallery.purged_seq` to it. A process that reads from an earlier position, such as that of an old snapshot, also
compares its keys with the database. So a deleted item's id is kept for one to two days; longer while a backfill, which
may have planned the item, is active or its curve, which follows the feed too, is being measured.
"""

from __future__ import annotations

import logging
import threading

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, or_, select, true, update

from index.events import Event
from service.backfills.states import ACTIVE
from service.background import Background
from service.errors import UnknownGallery
from service.store.database.connections import Database
from service.store.galleries.gallery import NOT_DELETED, take_seq
from service.store.outages import RecurringFaults
from service.store.sql.arrays import key_table
from service.store.sql.database_clock import now
from service.store.tables import backfill, backfill_curve, backfill_failure, gallery, item, item_traffic
from service.upgrades.curves.points import CurveState

logger = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
"""Pause between two searches for galleries that are due."""
SETTLE_SECONDS = 24 * 3600.0
"""Least time that a tombstone is kept; without active backfills it is at most about twice this."""
BLOCK = 5_000
"""Tombstones removed in one transaction."""


class TombstonePurger(Background):
    """A thread that removes tombstones; several processes take turns by the gallery's lock."""

    def __init__(self, database: Database, settle_seconds: float = SETTLE_SECONDS) -> None:
        super().__init__("tombstones")
        self._database, self._settle_seconds = database, settle_seconds
        self._errors = RecurringFaults(logger)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self._errors.attempt(Event("tombstones_not_purged"), self.look)

    def look(self) -> None:
        """Purge each gallery that is due."""
        with self._database.lookup() as connection:
            due = connection.execute(select(gallery.c.id).where(_is_due(self._settle_seconds))).scalars().all()
        for gallery_id in due:
            try:
                purge(self._database, gallery_id, self._settle_seconds, self._stop)
            except UnknownGallery:  # deleted since
                continue


def purge(database: Database, gallery_id: int, settle_seconds: float, stop: threading.Event) -> None:
    """If due, remove the tombstones up to the stored position and store the current one.

    Tombstones that a killed process left are removed the next time.

    Raises:
        UnknownGallery: the gallery was deleted.
    """
    with database.write() as connection:
        take_seq(connection, gallery_id, 0)
        noted = (
            update(gallery)
            .where(gallery.c.id == gallery_id, _is_due(settle_seconds))
            .values(purged_seq=gallery.c.settling_seq, settling_seq=gallery.c.next_seq - 1, settling_since=now())
        )
        purged_seq = connection.execute(noted.returning(gallery.c.purged_seq)).scalar()
    if purged_seq is None:
        return
    left = True
    while left and not stop.is_set():
        with database.write() as connection:
            left = _purge_block(connection, gallery_id, purged_seq)


def _is_due(settle_seconds: float) -> ColumnElement[bool]:
    """Whether a gallery has tombstones that no backfill needs, and its stored position is old enough or missing.

    A position from the future was stored before the clock was set back and is due, too.
    """
    since = gallery.c.settling_since
    settled = or_(since.is_(None), since <= now() - settle_seconds, since > now() + settle_seconds)
    has_tombstones = exists().where(item.c.gallery_id == gallery.c.id, item.c.deleted == true())
    measuring = exists().where(
        backfill_curve.c.backfill_id == backfill.c.id, backfill_curve.c.state == CurveState.MEASURING
    )
    active = or_(backfill.c.state.in_(ACTIVE), measuring)
    return and_(NOT_DELETED, settled, has_tombstones, ~exists().where(backfill.c.gallery_id == gallery.c.id, active))


def _purge_block(connection: Connection, gallery_id: int, purged_seq: int) -> bool:
    """Remove up to BLOCK tombstones; returns whether there may be more."""
    take_seq(connection, gallery_id, 0)
    conditions = (item.c.gallery_id == gallery_id, item.c.deleted == true(), item.c.seq <= purged_seq)
    # Locked, so that no process counts a match of one (`item_traffic`) between the statements that follow.
    found = select(item.c.id).where(*conditions).limit(BLOCK).with_for_update()
    keys = list(connection.execute(found).scalars())
    if keys:
        purged = key_table(connection, keys).keys
        for table in (item_traffic, backfill_failure):
            connection.execute(delete(table).where(table.c.item_id.in_(purged)))
        connection.execute(delete(item).where(item.c.id.in_(purged)))
    return len(keys) == BLOCK
