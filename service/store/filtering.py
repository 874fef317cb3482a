"""Which of some items pass a metadata filter, read from the database; queries ask the gallery's memory instead."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, and_, cast, literal, select

from index.filter import parse_filter
from index.metadata import Item, Metadata
from service.store.repository import STREAMED
from service.store.sql_arrays import key_range
from service.store.tables import item

ROWS = 4096
"""Items in memory at a time."""
MOST_LOOKED_AT = 65_536
"""Items that one page of those that pass looks at: as many as take some tenths of a second."""


def passing(
    connection: Connection, among: ColumnElement[bool], given: dict[str, Any], column: ColumnElement[Any] | None = None
) -> dict[int, Any]:
    """Key -> the value of `column`, by default 0, of the rows of `item` that `among` takes and the filter lets pass.

    Raises:
        InvalidFilter: it is no filter.
    """
    where = parse_filter(given)
    found: dict[int, Any] = {}
    columns = (item.c.id, literal(0) if column is None else column, cast(item.c.metadata, Text))
    rows = connection.execute(select(*columns).where(among), execution_options=STREAMED)
    for block in rows.partitions(ROWS):
        store = Metadata()
        slots = store.put([row[0] for row in block], {row[0]: Item(row[2]) for row in block})
        passed = store.select(where)[slots]
        found.update((row[0], row[1]) for row, good in zip(block, passed.tolist(), strict=True) if good)
    return found


def page_of_passing(
    connection: Connection, among: ColumnElement[bool], given: dict[str, Any], after: int, limit: int
) -> tuple[list[int], int | None]:
    """Keys, in order, of the next rows of `item` behind key `after` that `among` takes and the filter lets pass.

    `among` is as `key_range` wants it.

    Returns:
        Up to `limit` keys, fewer where `MOST_LOOKED_AT` rows hold no more; and the key behind which the others are to
        be looked for, None: there are none.

    Raises:
        InvalidFilter: it is no filter.
    """
    found: list[int] = []
    size, looked_at = limit + 1, 0
    while looked_at < MOST_LOOKED_AT:
        keys = key_range(connection, item.c.id, among, size, after)
        if len(keys):
            within = item.c.id.between(int(keys[0]), int(keys[-1]))
            found += sorted(passing(connection, and_(among, within), given))
        if len(found) > limit:
            return found[:limit], found[limit] - 1
        if len(keys) < size:
            return found, None
        after, looked_at, size = int(keys[-1]), looked_at + size, min(2 * size, ROWS)
    return found, after
