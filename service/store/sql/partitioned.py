"""Conditions on `embedding`, which PostgreSQL partitions by gallery and version; on SQLite it is one table.

On PostgreSQL it has another column, `gallery_id`, which is also part of its keys. With a condition on it, a statement
reads only the partitions of that gallery; without one, the result is the same, but all partitions are read.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Connection,
    FromClause,
    TableClause,
    and_,
    column,
    literal,
    table,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from service.store.tables import embedding, item

_PARTITIONED = table("embedding", *(column(each.name, each.type) for each in embedding.c), column("gallery_id"))


class in_gallery(FunctionElement[bool]):  # noqa: N801 - called like the functions of SQL
    """Whether a row is in the partitions of a gallery; always true on SQLite."""

    type = Boolean()
    inherit_cache = True

    def __init__(self, rows: FromClause, gallery: ColumnElement[int] | int) -> None:
        """`rows`: `embedding` or an alias of it; `gallery`: its id."""
        super().__init__(rows.c.item_id, literal(gallery, BigInteger) if isinstance(gallery, int) else gallery)


@compiles(in_gallery)
def _always_true(_element: in_gallery, _compiler: SQLCompiler, **_options: Any) -> str:
    return "1 = 1"


@compiles(in_gallery, "postgresql")
def _in_partitions(element: in_gallery, compiler: SQLCompiler, **options: Any) -> str:
    item_id, gallery = element.clauses
    gallery_id: Any = column("gallery_id", BigInteger)
    gallery_id.table = item_id.table  # qualifies it by the alias
    return compiler.process(gallery_id == gallery, **options)


def of_item(rows: FromClause = embedding) -> ColumnElement[bool]:
    """The join condition of `item` with `embedding` or an alias of it."""
    return and_(rows.c.item_id == item.c.id, in_gallery(rows, item.c.gallery_id))


def insert_target(connection: Connection, gallery_id: int) -> tuple[TableClause, dict[str, ColumnElement[Any]]]:
    """The table into which embeddings of a gallery are inserted, and the values of columns that only PostgreSQL has."""
    if connection.dialect.name == "sqlite":
        return embedding, {}
    return _PARTITIONED, {"gallery_id": literal(gallery_id, BigInteger)}
