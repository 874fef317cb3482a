"""A table of PostgreSQL with a column of vectors (pgvector, or an array), read in the order of its ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import sql

from index.errors import InvalidArgument
from regraft.sources.base import Batch, Wanted, batch_of


class PgvectorTable:
    """Rows of a table; `after` is the last id as text, so that what is written meanwhile moves nothing."""

    def __init__(self, address: str, table: str, wanted: Wanted) -> None:
        self._address, self._table = address, table
        self._wanted = wanted
        self._id = wanted.id or "id"
        self._vector, self._version = wanted.vector("embedding")
        self._name = sql.Identifier(*table.split("."))
        try:
            with psycopg.connect(address) as connection:
                described = connection.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(self._name)).description
                kind = sql.SQL("SELECT pg_typeof({})::text FROM {} LIMIT 1").format(
                    sql.Identifier(self._id), self._name
                )
                self._columns = [column.name for column in described or ()]
                self._kind = (connection.execute(kind).fetchone() or ("text",))[0] if self._id in self._columns else ""
        except psycopg.Error as error:
            raise InvalidArgument(f"the table {table!r} cannot be read: {str(error).splitlines()[0]}") from error
        if unknown := [name for name in (self._id, self._vector) if name not in self._columns]:
            raise InvalidArgument(f"{table} has no column {unknown[0]!r}; it has {', '.join(self._columns)}")

    @property
    def identity(self) -> str:
        return f"pgvector {self._table}"

    @property
    def count(self) -> int:
        with psycopg.connect(self._address) as connection:
            found = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(self._name)).fetchone()
            return int(found[0]) if found else 0

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        key, vector = sql.Identifier(self._id), sql.Identifier(self._vector)
        others = [name for name in self._columns if name not in (self._id, self._vector)]
        beside = sql.SQL("").join(sql.SQL(", {}").format(sql.Identifier(name)) for name in others)
        # `real[]`: what pgvector's types and arrays can all be cast to.
        chosen = sql.SQL("SELECT {}::text, {}::real[] {} FROM {}").format(key, vector, beside, self._name)
        behind = sql.SQL(" WHERE {} > CAST(%s AS {})").format(key, sql.SQL(self._kind))
        ordered = sql.SQL(" ORDER BY {} LIMIT %s").format(key)
        with psycopg.connect(self._address) as connection:
            while True:
                where, given = (sql.SQL(""), (size,)) if after is None else (behind, (after, size))
                rows = connection.execute(chosen + where + ordered, given).fetchall()
                if not rows:
                    return
                after = rows[-1][0]
                told = (self._wanted.described(dict(zip(others, row[2:], strict=True))) for row in rows)
                yield batch_of(
                    [(row[0], row[1], one) for row, one in zip(rows, told, strict=True)], self._version, after
                )
