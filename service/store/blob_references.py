"""What refers to stored images: the one place that knows every column that does.

A key is drawn for one row and named by no other, so whoever deletes a row may remove its image; only a search for what
is left over or lost has to ask here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, FromClause, Select, and_, select

from service.store.blobs import Blobs
from service.store.database import Database
from service.store.repository import NOT_DELETED, STREAMED
from service.store.tables import evaluation, evaluation_entry, gallery, item
from service.store.vector_files import newest_files

SOME = 50
"""How many images of each kind are looked for, to know a store that has no marker."""


@dataclass(frozen=True)
class Reference:
    """A row that names an image: `of` is "item" or "evaluation", `owner` what a user calls it."""

    key: str
    of: str
    owner: str


@dataclass(frozen=True)
class BlobColumn:
    """A `column` that names images, `of` such a thing.

    `owner` is what a user calls a row of `rows`, with the values of `columns` in it; those last written have the
    greatest `newest`.
    """

    column: Column[Any]
    of: str
    rows: FromClause
    owner: str
    columns: tuple[Column[Any], ...]
    newest: Column[Any]


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
"""Every column that names an image."""


def references(connection: Connection) -> Iterator[Reference]:
    """Every row that names an image; one snapshot if the connection is in one."""
    for place in BLOB_COLUMNS:
        named = select(place.column, *place.columns).select_from(place.rows).where(_there(place))
        for key, *columns in connection.execute(named, execution_options=STREAMED):
            yield Reference(key, place.of, place.owner.format(*columns))


def open_blobs(database: Database, url: str) -> Blobs:
    """The store of the images that rows of this database name, and of its vectors that lie in files."""

    def named() -> list[str]:
        with database.lookup() as connection:
            images = [key for place in BLOB_COLUMNS for key in connection.execute(_newest(place)).scalars()]
            return [*images, *newest_files(connection, SOME)]

    blobs = database.vectors.blobs = Blobs(url, named)
    return blobs


def _newest(place: BlobColumn) -> Select[str]:
    named = select(place.column).select_from(place.rows).where(_there(place))
    return named.order_by(place.newest.desc()).limit(SOME)


def _there(place: BlobColumn) -> ColumnElement[bool]:
    """Of its rows: those that name an image which has to be there. Those of a deleted gallery may be gone."""
    return and_(place.column.is_not(None), NOT_DELETED)
