"""`PgvectorTable`: a PostgreSQL table with a column of vectors (pgvector or arrays), read in the order of its ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types import datetime

from index.engines.pgvector.connections import libpq_url
from index.errors import InvalidArgument
from regraft.sources.base import NO_ID, Batch, Wanted, batch_of

VECTORS = ["vector", "halfvec", "sparsevec"]
"""pgvector's types."""


class PgvectorTable:
    """Rows of a table; `after` is the last id read, as text, so that concurrent writes do not shift pages."""

    def __init__(self, address: str, table: str, wanted: Wanted) -> None:
        # The address may be a REGRAFT_DATABASE_URL, which names a driver.
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
                found = connection.execute("SELECT oid FROM pg_type WHERE typname = ANY(%s)", (VECTORS,))
                kinds = {oid for (oid,) in found}
                self._vectors = [column.name for column in described or () if column.type_code in kinds]
        except psycopg.Error as error:
            raise InvalidArgument(f"the table {table!r} cannot be read: {str(error).splitlines()[0]}") from error
        needed = (self._id, self._vector, *(() if wanted.text is None else (wanted.text,)))
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
        return {}  # the metric belongs to queries, not to the table

    @property
    def fields(self) -> Sequence[str]:
        return self._columns

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        others = self._others()
        # One transaction per page: a transaction of hours would keep old rows from being vacuumed.
        with psycopg.connect(self._address, autocommit=True) as connection:
            for kind, loader in DATES.items():
                connection.adapters.register_loader(kind, loader)
            while rows := self._page(connection, others, size, after):
                about = [dict(zip(others, row[2:], strict=True)) for row in rows]
                given = [(row[0], row[1], self._wanted.metadata_of(one)) for row, one in zip(rows, about, strict=True)]
                if after is None:  # the columns themselves were found in the table
                    self._wanted.check_flatten(about)
                after = rows[-1][0]
                yield batch_of(given, self._version, after, self._wanted.texts_of(about))
            unnamed = sql.SQL("SELECT count(*) FROM {} WHERE {} IS NULL").format(self._name, sql.Identifier(self._id))
            if (found := connection.execute(unnamed).fetchone()) and found[0]:
                yield Batch(found[0], [], [], [], after, {NO_ID: found[0]})

    def _others(self) -> list[str]:
        """The columns to read beside id and vector. A vector is no metadata, unless it is asked for."""
        if self._wanted.metadata is None:
            taken = {self._id, self._vector, *self._vectors} - {self._wanted.text}
            return [name for name in self._columns if name not in taken]
        return list(dict.fromkeys([*self._wanted.metadata, *self._wanted.flatten, *filter(None, [self._wanted.text])]))

    def _page(self, connection: psycopg.Connection[Any], others: Sequence[str], size: int, after: Any) -> list[Any]:
        """The next rows with an id: the id as text, the vector, and the other columns."""
        # Qualified by the table: else ORDER BY would mean the selected text, in which 10 < 9.
        key, vector = sql.Identifier(*self._table, self._id), sql.Identifier(self._vector)
        beside = sql.SQL("").join(sql.SQL(", {}").format(sql.Identifier(name)) for name in others)
        # `real[]`: pgvector's types and arrays can all be cast to it.
        chosen = sql.SQL("SELECT {}::text, {}::real[] {} FROM {}").format(key, vector, beside, self._name)
        # Rows without an id would sort last, and no page could continue after them. The last id is an untyped
        # parameter, which takes the column's type: an explicit cast to `character` or `bit` would truncate it.
        behind = sql.SQL(" WHERE {} IS NOT NULL" if after is None else " WHERE {} > %s").format(key)
        # With ties: the next page begins after this id, so that all its rows are of this one.
        ordered = sql.SQL(" ORDER BY {} FETCH FIRST (%s) ROWS WITH TIES").format(key)
        return connection.execute(chosen + behind + ordered, (size,) if after is None else (after, size)).fetchall()


class _Date(datetime.DateLoader):
    """Dates that Python has not, such as `infinity` or one before Christ, stay PostgreSQL's text."""

    def load(self, data: Any) -> Any:
        return _or_text(super().load, data)


class _Timestamp(datetime.TimestampLoader):
    """As `_Date`."""

    def load(self, data: Any) -> Any:
        return _or_text(super().load, data)


class _Timestamptz(datetime.TimestamptzLoader):
    """As `_Date`."""

    def load(self, data: Any) -> Any:
        return _or_text(super().load, data)


def _or_text(load: Callable[[Any], Any], data: Any) -> Any:
    try:
        return load(data)
    except psycopg.DataError:
        return bytes(data).decode()


DATES: Mapping[str, Any] = {"date": _Date, "timestamp": _Timestamp, "timestamptz": _Timestamptz}
"""Type -> how its values are read."""
