"""The valid snapshots of galleries: those with a row in `gallery_snapshot`.

A row is written after the files. So a database that was restored from a backup accepts only snapshots of its own past.
Feed numbers could not ensure this, as a restored database assigns later ones again, for other items.
"""

from __future__ import annotations

from sqlalchemy import Connection, delete, insert, literal, select

from service.store.galleries.gallery import NOT_DELETED
from service.store.sql.database_clock import now
from service.store.tables import gallery, gallery_snapshot

MAX_RECORDED = 16
"""Most valid snapshots of a gallery; several machines, each with its own snapshots, may share one database."""


def snapshots_of(connection: Connection, gallery_id: int) -> list[str]:
    """The names of a gallery's snapshots, newest first."""
    statement = select(gallery_snapshot.c.sha256).where(gallery_snapshot.c.gallery_id == gallery_id)
    return list(connection.execute(statement.order_by(gallery_snapshot.c.created.desc())).scalars())


def record_snapshot(connection: Connection, gallery_id: int, name: str, seq: int) -> None:
    """Make a snapshot taken at feed number `seq` valid, and the oldest ones beyond `MAX_RECORDED` invalid.

    The snapshot stays invalid if its gallery was deleted, or if the feed has not reached `seq`, as the database was
    restored meanwhile.
    """
    removed = [name, *snapshots_of(connection, gallery_id)[MAX_RECORDED - 1 :]]
    of_gallery = gallery_snapshot.c.gallery_id == gallery_id
    connection.execute(delete(gallery_snapshot).where(of_gallery, gallery_snapshot.c.sha256.in_(removed)))
    is_reached = (gallery.c.id == gallery_id, NOT_DELETED, gallery.c.next_seq > seq)
    row = select(gallery.c.id, literal(name), now()).where(*is_reached)
    connection.execute(insert(gallery_snapshot).from_select(["gallery_id", "sha256", "created"], row))
