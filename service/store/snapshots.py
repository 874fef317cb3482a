"""The snapshots of galleries that count: what the database names is a part of its own past, what it does not is not.

A row is written when the files are, so a database that was restored knows only of snapshots from before its copy, and
the numbers of its change feed, which it may give once more for other items, say nothing.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, delete, insert, literal, select

from service.store.repository import NOT_DELETED
from service.store.tables import gallery, gallery_snapshot

KEPT = 16
"""The newest of a gallery that are known; several machines with a folder each may follow one database."""


def snapshots_of(connection: Connection, gallery_id: int) -> list[str]:
    """The names of a gallery's snapshots, newest first."""
    statement = select(gallery_snapshot.c.sha256).where(gallery_snapshot.c.gallery_id == gallery_id)
    return list(connection.execute(statement.order_by(gallery_snapshot.c.created.desc())).scalars())


def note_snapshot(connection: Connection, gallery_id: int, name: str, seq: int) -> None:
    """Have a snapshot count that was taken at number `seq` of the feed, and forget the oldest.

    Unless its gallery is gone, or the feed has not come there: the database is an older one than that it was taken of.
    """
    forgotten = [name, *snapshots_of(connection, gallery_id)[KEPT - 1 :]]
    condition = gallery_snapshot.c.gallery_id == gallery_id
    connection.execute(delete(gallery_snapshot).where(condition, gallery_snapshot.c.sha256.in_(forgotten)))
    there = (gallery.c.id == gallery_id, NOT_DELETED, gallery.c.next_seq > seq)
    row = select(gallery.c.id, literal(name), literal(time.time())).where(*there)
    connection.execute(insert(gallery_snapshot).from_select(["gallery_id", "sha256", "created"], row))
