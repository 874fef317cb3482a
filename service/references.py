"""What refers to stored images: the one place that knows every column that does.

A key is drawn for one row and named by no other, so whoever deletes a row may remove its image; only a search for what
is left over or lost has to ask here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, select

from service.blobs import Blobs
from service.database import Database
from service.repository import STREAMED
from service.tables import evaluation, evaluation_entry, gallery, item

BLOB_COLUMNS = (item.c.blob, evaluation_entry.c.blob)
"""Every column that names an image."""
SOME = 50
"""How many images of each kind are looked for, to know a store that has no marker."""


@dataclass(frozen=True)
class Reference:
    """A row that names an image: `of` is "item" or "evaluation", `owner` what a user calls it."""

    key: str
    of: str
    owner: str


def references(connection: Connection) -> Iterator[Reference]:
    """Every row that names an image; one snapshot if the connection is in one."""
    for row in _streamed(connection, select(item.c.blob, gallery.c.name, item.c.external_id).join(gallery)):
        yield Reference(row[0], "item", f"{row[1]}/{row[2]}")
    columns = (evaluation_entry.c.blob, gallery.c.name, evaluation.c.id, evaluation_entry.c.number)
    joined = evaluation_entry.join(evaluation).join(gallery)
    for row in _streamed(connection, select(*columns).select_from(joined)):
        yield Reference(row[0], "evaluation", f"{row[1]}, evaluation {row[2]}, entry {row[3]}")


def open_blobs(database: Database, url: str) -> Blobs:
    """The store of the images that rows of this database name."""

    def named() -> list[str]:
        newest = [(item.c.blob, item.c.id), (evaluation_entry.c.blob, evaluation_entry.c.evaluation_id)]
        with database.lookup() as connection:
            some = [select(blob).where(blob.is_not(None)).order_by(key.desc()).limit(SOME) for blob, key in newest]
            return [key for statement in some for key in connection.execute(statement).scalars()]

    return Blobs(url, named)


def _streamed(connection: Connection, statement: Select[*tuple[Any, ...]]) -> Any:
    named = statement.where(statement.selected_columns.blob.is_not(None))
    return connection.execute(named, execution_options=STREAMED)
