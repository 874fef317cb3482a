"""Many keys in a statement: as one parameter, or in blocks that fit; and the INSERT of each database.

`IN (?, ?, ...)` is compiled again for every number of keys, and a statement per row is slow. A list that is one
parameter avoids both, and the database processes it without the GIL.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    Connection,
    Integer,
    Select,
    Text,
    bindparam,
    cast,
    column,
    func,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import ARRAY

INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
"""Dialect -> an INSERT that supports ON CONFLICT."""
BLOCK = 5_000
"""Most parameters in one statement; SQLite permits 32,766, PostgreSQL 65,535."""

T = TypeVar("T")


class SqlArray(NamedTuple):
    """A list of keys as a table: each key, and its position in the list, from 0."""

    key: ColumnElement[int]
    place: ColumnElement[int]

    @property
    def keys(self) -> Select[tuple[int]]:
        """For `column.in_(table.keys)`."""
        return select(self.key)


def key_table(connection: Connection, keys: Sequence[int]) -> SqlArray:
    """The keys as a table of the connection's database: SQLite reads them from JSON, PostgreSQL from an array."""
    if connection.dialect.name == "sqlite":
        rows = func.json_each(json.dumps(list(keys))).table_valued(column("value", Integer), column("key", Integer))
        return SqlArray(rows.c.value, rows.c.key)
    array = bindparam(None, list(keys), ARRAY(BigInteger))
    rows = func.unnest(array).table_valued(column("value", BigInteger), with_ordinality="number").render_derived()
    return SqlArray(rows.c.value, rows.c.number - 1)


class SqlCounts(NamedTuple):
    """Keys as a table, each with a number."""

    key: ColumnElement[int]
    number: ColumnElement[int]


def count_table(connection: Connection, counts: Mapping[int, int]) -> SqlCounts:
    """Key -> number as a table of the connection's database: SQLite reads them from JSON, PostgreSQL from arrays."""
    if connection.dialect.name == "sqlite":
        rows = func.json_each(json.dumps(counts)).table_valued(column("key", Text), column("value", Integer))
        return SqlCounts(cast(rows.c.key, Integer), rows.c.value)
    arrays = (bindparam(None, list(one), ARRAY(BigInteger)) for one in (counts.keys(), counts.values()))
    columns = (column("key", BigInteger), column("value", BigInteger))
    rows = func.unnest(*arrays).table_valued(*columns).render_derived()
    return SqlCounts(rows.c.key, rows.c.value)


class SqlRecords(NamedTuple):
    """Names, each with a JSON object and an optional text, as a table, with their position in the list, from 0."""

    name: ColumnElement[str]
    document: ColumnElement[Any]
    text: ColumnElement[str | None]
    place: ColumnElement[int]


def records(
    connection: Connection, names: Sequence[str], objects: Sequence[Mapping[str, Any]], beside: Sequence[str | None]
) -> SqlRecords:
    """Names, objects and texts as a table: SQLite reads them from JSON, PostgreSQL from arrays.

    With JSON, PostgreSQL would refuse metadata that have a NUL character, when it extracts the names.
    """
    if connection.dialect.name == "sqlite":
        text = to_json(list(zip(names, objects, beside, strict=True)))
        rows = func.json_each(text).table_valued(column("value", Text), column("key", Integer))
        name, document, more = (func.json_extract(rows.c.value, f"$[{part}]") for part in range(3))
        return SqlRecords(name, document, more, rows.c.key)
    arrays = (bindparam(None, list(one), ARRAY(Text)) for one in (names, map(to_json, objects), beside))
    columns = (column("name", Text), column("document", Text), column("beside", Text))
    table = func.unnest(*arrays).table_valued(*columns, with_ordinality="number").render_derived()
    return SqlRecords(table.c.name, cast(table.c.document, JSON), table.c.beside, table.c.number - 1)


def to_json(value: Any) -> str:
    """A value as JSON, by orjson, or by Python's encoder for integers beyond 64 bits."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return json.dumps(value)


def texts(connection: Connection, values: Sequence[str]) -> Select[tuple[str]]:
    """Texts as one parameter, for `column.in_(texts)`."""
    if connection.dialect.name == "sqlite":
        rows = func.json_each(json.dumps(list(values))).table_valued(column("value", Text))
    else:
        rows = (
            func.unnest(bindparam(None, list(values), ARRAY(Text))).table_valued(column("value", Text)).render_derived()
        )
    return select(rows.c.value)


def select_keys(connection: Connection, keys: Select[Any]) -> NDArray[np.int64]:
    """The keys that a statement selects, ascending, fetched as one value, in a quarter of the time of single rows."""
    found = keys.subquery().c[0]
    if connection.dialect.name == "sqlite":
        together = json.loads(connection.execute(select(func.json_group_array(found))).scalar_one())
    else:
        together = connection.execute(select(func.array_agg(found))).scalar_one() or ()
    return np.sort(np.array(together, np.int64))


def select_columns(connection: Connection, keyed: Select[tuple[int, str]]) -> tuple[Sequence[int], Sequence[str]]:
    """The two columns of a statement, keys and JSON without line breaks, fetched as one row, like `select_keys`."""
    key, document = keyed.subquery().c
    if connection.dialect.name == "sqlite":
        together = select(func.json_group_array(key), func.group_concat(document, "\n"))
        keys, documents = connection.execute(together).one()
        return orjson.loads(keys), documents.split("\n")
    keys, documents = connection.execute(select(func.array_agg(key), func.array_agg(document))).one()
    return keys, documents


def key_range(
    connection: Connection,
    key: ColumnElement[int],
    condition: ColumnElement[bool],
    rows: int,
    after: int | None = None,
    *,
    descending: bool = False,
) -> NDArray[np.int64]:
    """The next keys that meet `condition`, in order: up to `rows` after the key `after`, by default from the first.

    `key` is positive and unique, with an index that covers `condition`, so that each range costs the same.
    """
    statement = select(key).where(condition).order_by(key.desc() if descending else key).limit(rows)
    if after is not None:
        statement = statement.where(key < after if descending else key > after)
    found = select_keys(connection, statement)
    return found[::-1] if descending else found


def blocks(values: Sequence[T], size: int | None = None) -> Iterator[Sequence[T]]:
    """Values in blocks of `size`; by default as many as fit one statement."""
    step = size or BLOCK
    return (values[start : start + step] for start in range(0, len(values), step))
