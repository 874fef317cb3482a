"""Which snapshots of galleries are valid: those that have a row here.

A row is written after the files. So a database that was restored from a backup knows only snapshots of its own past;
feed numbers could not tell, as a restored database gives later ones once more, for other items.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, delete, insert, literal, select

from service.store.repository import NOT_DELETED
from service.store.tables import gallery, gallery_snapshot

MAX_RECORDED = 16
"""The most snapshots of a gallery that are valid; several machines, each with its own, may share one database."""


def snapshots_of(connection: Connection, gallery_id: int) -> list[str]:
    """The names of a gallery's snapshots, newest first."""
    statement = select(gallery_snapshot.c.sha256).where(gallery_snapshot.c.gallery_id == gallery_id)
    return list(connection.execute(statement.order_by(gallery_snapshot.c.created.desc())).scalars())


def record_snapshot(connection: Connection, gallery_id: int, name: str, seq: int) -> None:
    """Make a snapshot valid that was taken at feed number `seq`, and the oldest ones beyond `MAX_RECORDED` invalid.

    Not if its gallery was deleted, or the feed has not reached `seq`: then the database was restored meanwhile.
    """
    removed = [name, *snapshots_of(connection, gallery_id)[MAX_RECORDED - 1 :]]
    of_gallery = gallery_snapshot.c.gallery_id == gallery_id
    connection.execute(delete(gallery_snapshot).where(of_gallery, gallery_snapshot.c.sha256.in_(removed)))
    is_reached = (gallery.c.id == gallery_id, NOT_DELETED, gallery.c.next_seq > seq)
    row = select(gallery.c.id, literal(name), literal(time.time())).where(*is_reached)
    connection.execute(insert(gallery_snapshot).from_select(["gallery_id", "sha256", "created"], row))
