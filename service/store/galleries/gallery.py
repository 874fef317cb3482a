"""SQL about galleries: their rows, and the numbers of their change feeds. Functions run in the caller's transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, insert, select, update

from index.engines.config import IndexConfig, IndexKind
from index.errors import shortened
from index.version import NAME
from service.errors import UnknownGallery
from service.store.rows import GalleryRow, all_of, first_of
from service.store.sql.arrays import key_table
from service.store.tables import gallery

NOT_DELETED = gallery.c.deleted.is_(None)
"""Condition on galleries. The row of a deleted one stays until its items are freed."""


def insert_gallery(connection: Connection, name: str, index: IndexConfig | None = None) -> int:
    """Add an empty gallery; returns its id. Raises IntegrityError if the name is taken."""
    values = {"name": name, "next_seq": 1, "created": time.time(), "index_config": _index(index)}
    return int(connection.execute(insert(gallery).values(values).returning(gallery.c.id)).scalar_one())


def set_index(connection: Connection, gallery_id: int, index: IndexConfig) -> None:
    """Change how a gallery is indexed; takes a feed number, so that every process follows."""
    take_seq(connection, gallery_id, 1)
    connection.execute(update(gallery).where(gallery.c.id == gallery_id).values(index_config=_index(index)))


def index_of(row: GalleryRow) -> IndexConfig:
    """The index configuration of a gallery."""
    return IndexConfig.model_validate(row.index_config or {})


def _index(index: IndexConfig | None) -> dict[str, Any] | None:
    return None if index is None else index.model_dump(mode="json", exclude_defaults=True)


def all_galleries(connection: Connection) -> list[GalleryRow]:
    """Every gallery's row, in order of creation."""
    return all_of(GalleryRow, connection.execute(select(gallery).where(NOT_DELETED).order_by(gallery.c.id)))


def galleries_of_kinds(connection: Connection, kinds: Sequence[IndexKind]) -> list[GalleryRow]:
    """The rows of the galleries whose index is of one of these kinds, in order of creation."""
    chosen = gallery.c.index_config["kind"].as_string().in_(kinds)
    return all_of(GalleryRow, connection.execute(select(gallery).where(NOT_DELETED, chosen).order_by(gallery.c.id)))


def gallery_states(connection: Connection, among: Sequence[int] | None = None) -> dict[int, tuple[int, int | None]]:
    """Id -> (next feed number, current version) of every gallery, or of those `among`."""
    which = () if among is None else (gallery.c.id.in_(key_table(connection, among).keys),)
    columns = select(gallery.c.id, gallery.c.next_seq, gallery.c.current_id).where(NOT_DELETED, *which)
    return {row[0]: (row[1], row[2]) for row in connection.execute(columns.order_by(gallery.c.id))}


def gallery_named(connection: Connection, name: str) -> GalleryRow:
    """The row of the gallery of this name. Raises UnknownGallery."""
    statement = select(gallery).where(gallery.c.name == name, NOT_DELETED)
    row = first_of(GalleryRow, connection.execute(statement)) if NAME.fullmatch(name) else None
    if row is None:
        raise UnknownGallery(f"gallery {shortened(name)!r} does not exist")
    return row


def gallery_row(connection: Connection, gallery_id: int) -> GalleryRow | None:
    """The gallery's row; None: it was deleted."""
    return first_of(GalleryRow, connection.execute(select(gallery).where(gallery.c.id == gallery_id, NOT_DELETED)))


def take_seq(connection: Connection, gallery_id: int, count: int) -> int:
    """Take the next `count` numbers of the gallery's change feed and return the first.

    Call it before reading or writing anything else: it locks the gallery's row until the commit, so that numbers are in
    commit order, and a gallery has one writer at a time. Unused numbers leave a harmless gap.

    Raises:
        UnknownGallery: the gallery was deleted.
    """
    statement = (
        update(gallery)
        .where(gallery.c.id == gallery_id, NOT_DELETED)
        .values(next_seq=gallery.c.next_seq + count)
        .returning(gallery.c.next_seq)
    )
    after = connection.execute(statement).scalar()
    if after is None:
        raise UnknownGallery("the gallery was deleted")
    return int(after) - count


def lock_galleries(connection: Connection) -> list[GalleryRow]:
    """Lock all galleries until the commit, as `take_seq` locks one; returns their rows, in order of creation."""
    # In one order, so that two processes never wait for each other. SQLite has no locks of rows, and one writer anyway.
    statement = select(gallery).where(NOT_DELETED).order_by(gallery.c.id).with_for_update(key_share=True)
    return all_of(GalleryRow, connection.execute(statement))
