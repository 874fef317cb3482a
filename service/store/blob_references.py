"""The rows that refer to stored images and texts: BLOB_COLUMNS lists every column that does.

No two rows share a key, so deleting a row may delete its image; only searches for orphaned or lost images need this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, FromClause, Select, and_, select

from service.store.database.connections import STREAMED, Database
from service.store.galleries.gallery import NOT_DELETED
from service.store.image_store.blobs import Blobs
from service.store.tables import evaluation, evaluation_entry, gallery, image_store, item
from service.store.vectors.files import newest_files

SAMPLE = 50
"""How many images of each kind are looked up to recognise a store without a marker."""


@dataclass(frozen=True)
class Reference:
    """A row that refers to an image by its key: `kind` is "item" or "evaluation", `owner` names the row for users."""

    key: str
    kind: str
    owner: str


@dataclass(frozen=True)
class BlobColumn:
    """A column that holds keys of images.

    Attributes:
        column: the column.
        kind: of the `Reference`s.
        tables: the table of the column, joined with those that name a row.
        owner: format of `Reference.owner`, filled with the values of `owner_columns`.
        owner_columns: columns of `tables`.
        order: a column that is greatest in the newest rows.
    """

    column: Column[Any]
    kind: str
    tables: FromClause
    owner: str
    owner_columns: tuple[Column[Any], ...]
    order: Column[Any]


BLOB_COLUMNS = (
    BlobColumn(item.c.blob, "item", item.join(gallery), "{}/{}", (gallery.c.name, item.c.external_id), item.c.id),
    BlobColumn(
        evaluation_entry.c.blob,
        "evaluation",
        evaluation_entry.join(evaluation).join(gallery),
        "{}, evaluation {}, entry {}",
        (gallery.c.name, evaluation.c.id, evaluation_entry.c.number),
        evaluation_entry.c.evaluation_id,
    ),
)
"""Every column that holds keys of images."""


def references(connection: Connection) -> Iterator[Reference]:
    """Every row that refers to an image or text, in a snapshot if the connection has one."""
    for source in BLOB_COLUMNS:
        statement = select(source.column, *source.owner_columns).select_from(source.tables).where(_has_image(source))
        for key, *values in connection.execute(statement, execution_options=STREAMED):
            yield Reference(key, source.kind, source.owner.format(*values))


def open_blobs(database: Database, url: str) -> Blobs:
    """Open the store of the images that this database refers to, and of its vectors in files."""

    def newest_keys() -> list[str]:
        with database.lookup() as connection:
            images = [key for source in BLOB_COLUMNS for key in connection.execute(_newest(source)).scalars()]
            return [*images, *newest_files(connection, SAMPLE)]

    @cache
    def marker() -> str:
        with database.lookup() as connection:
            return str(connection.execute(select(image_store.c.marker)).scalar_one())

    blobs = database.vectors.blobs = Blobs(url, newest_keys, marker)
    return blobs


def check_store(database: Database, url: str) -> None:
    """Raise StoreUnreachable unless the store answers and is this database's, see `Blobs.check`."""
    (database.vectors.blobs or open_blobs(database, url)).check()


def _newest(source: BlobColumn) -> Select[str]:
    statement = select(source.column).select_from(source.tables).where(_has_image(source))
    return statement.order_by(source.order.desc()).limit(SAMPLE)


def _has_image(source: BlobColumn) -> ColumnElement[bool]:
    """Whether a row refers to an image that must exist; a deleted gallery's may be removed already."""
    return and_(source.column.is_not(None), NOT_DELETED)
