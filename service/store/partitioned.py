"""Expressions over `embedding`, which PostgreSQL keeps in partitions by gallery and version and SQLite in one piece.

There it has one more column, `gallery_id`, that its key and the way to `item` have too. Whoever says which gallery is
meant has the other partitions left out; a statement that does not is right as well, and looks at all of them.
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
    """Whether a row, told by its `item_id`, lies in the partitions of a gallery; where there are none, true."""

    type = Boolean()
    inherit_cache = True

    def __init__(self, held: FromClause, gallery: ColumnElement[int] | int) -> None:
        """`held`: `embedding` or an alias of it."""
        super().__init__(held.c.item_id, literal(gallery, BigInteger) if isinstance(gallery, int) else gallery)


@compiles(in_gallery)
def _anywhere(_element: in_gallery, _compiler: SQLCompiler, **_options: Any) -> str:
    return "1 = 1"


@compiles(in_gallery, "postgresql")
def _in_its_partitions(element: in_gallery, compiler: SQLCompiler, **options: Any) -> str:
    item_id, gallery = element.clauses
    mine: Any = column("gallery_id", BigInteger)
    mine.table = item_id.table
    return compiler.process(mine == gallery, **options)


def of_item(held: FromClause = embedding) -> ColumnElement[bool]:
    """Whether a row of `embedding`, or of an alias of it, belongs to a row of `item`."""
    return and_(held.c.item_id == item.c.id, in_gallery(held, item.c.gallery_id))


def place_of_rows(connection: Connection, gallery_id: int) -> tuple[TableClause, dict[str, ColumnElement[Any]]]:
    """What embeddings of a gallery are inserted into, and the columns that say where in it."""
    if connection.dialect.name == "sqlite":
        return embedding, {}
    return _PARTITIONED, {"gallery_id": literal(gallery_id, BigInteger)}
