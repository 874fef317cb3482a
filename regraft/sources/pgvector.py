"""A table of PostgreSQL with a column of vectors (pgvector, or an array), read in the order of its ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql

from index.engines.pg_connections import libpq_url
from index.errors import InvalidArgument
from regraft.sources.base import NO_ID, Batch, Wanted, batch_of


class PgvectorTable:
    """Rows of a table; `after` is the last id as text, so that what is written meanwhile moves nothing."""

    def __init__(self, address: str, table: str, wanted: Wanted) -> None:
        # An address may be the service's own REGRAFT_DATABASE_URL.
        self._address, self._wanted = libpq_url(address), wanted
        self._id = wanted.id or "id"
        self._vector, self._version = wanted.vector("embedding")
        self._table = table.split(".")
        self._name = sql.Identifier(*self._table)
        try:
            with psycopg.connect(self._address) as connection:
                at = connection.info
                self._identity = f"pgvector {at.host}:{at.port}/{at.dbname} {table} {self._id}"
                described = connection.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(self._name)).description
                self._columns = [column.name for column in described or ()]
        except psycopg.Error as error:
            raise InvalidArgument(f"the table {table!r} cannot be read: {str(error).splitlines()[0]}") from error
        needed = (self._id, self._vector, *([wanted.text] if wanted.text is not None else ()))
        if unknown := [name for name in needed if name not in self._columns]:
            raise InvalidArgument(f"{table} has no column {unknown[0]!r}, only: {', '.join(self._columns)}")

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def count(self) -> int:
        with psycopg.connect(self._address) as connection:
            found = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(self._name)).fetchone()
            return int(found[0]) if found else 0

    @property
    def metrics(self) -> Mapping[str | None, str]:
        return {}  # a query says it, not the table

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        others = [name for name in self._columns if name not in (self._id, self._vector)]
        # Each page is a transaction: one for hours would keep the table's old rows from being cleaned up.
        with psycopg.connect(self._address, autocommit=True) as connection:
            while rows := self._page(connection, others, size, after):
                about = [dict(zip(others, row[2:], strict=True)) for row in rows]
                given = [(row[0], row[1], self._wanted.metadata_of(one)) for row, one in zip(rows, about, strict=True)]
                texts, after = self._wanted.texts_of(about, first=after is None), rows[-1][0]
                yield batch_of(given, self._version, after, texts)
            unnamed = sql.SQL("SELECT count(*) FROM {} WHERE {} IS NULL").format(self._name, sql.Identifier(self._id))
            if (found := connection.execute(unnamed).fetchone()) and found[0]:
                yield Batch(found[0], [], [], [], after, {NO_ID: found[0]})

    def _page(self, connection: psycopg.Connection[Any], others: Sequence[str], size: int, after: Any) -> list[Any]:
        """The next rows with an id: it as text, the vector, and the other columns."""
        # With the table's name before it: alone it would mean, in ORDER BY, the text that is selected, where 10 < 9.
        key, vector = sql.Identifier(*self._table, self._id), sql.Identifier(self._vector)
        beside = sql.SQL("").join(sql.SQL(", {}").format(sql.Identifier(name)) for name in others)
        # `real[]`: what pgvector's types and arrays can all be cast to.
        chosen = sql.SQL("SELECT {}::text, {}::real[] {} FROM {}").format(key, vector, beside, self._name)
        # Those without an id would come last in this order, and nothing is behind them to go on with. The last id
        # goes without a type and becomes one of the column's: a cast to `character` or `bit` would leave its first one.
        behind = sql.SQL(" WHERE {} IS NOT NULL" if after is None else " WHERE {} > %s").format(key)
        ordered = sql.SQL(" ORDER BY {} LIMIT %s").format(key)
        return connection.execute(chosen + behind + ordered, (size,) if after is None else (after, size)).fetchall()
