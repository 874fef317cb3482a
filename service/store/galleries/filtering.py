"""Filter items by metadata in the database; queries filter in memory instead."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, and_, cast, literal, select

from index.metadata.filter import parse_filter
from index.metadata.metadata import Item, Metadata
from service.store.database.connections import STREAMED
from service.store.sql.arrays import key_range
from service.store.tables import item

BLOCK = 4096
"""Items that are filtered at a time."""
MAX_EXAMINED = 65_536
"""Most items that one page examines, which takes some tenths of a second."""


def passing(
    connection: Connection,
    condition: ColumnElement[bool],
    filter_json: dict[str, Any],
    column: ColumnElement[Any] | None = None,
) -> dict[int, Any]:
    """Key -> the value of `column`, by default 0, of the items that meet `condition` and pass the filter.

    Raises:
        InvalidFilter: the filter is invalid.
    """
    metadata_filter = parse_filter(filter_json)
    values: dict[int, Any] = {}
    columns = (item.c.id, literal(0) if column is None else column, cast(item.c.metadata, Text))
    rows = connection.execute(select(*columns).where(condition), execution_options=STREAMED)
    for block in rows.partitions(BLOCK):
        store = Metadata()
        slots = store.put([row[0] for row in block], {row[0]: Item(row[2]) for row in block})
        passed = store.select(metadata_filter)[slots]
        values.update((row[0], row[1]) for row, passes in zip(block, passed.tolist(), strict=True) if passes)
    return values


def page_of_passing(
    connection: Connection, condition: ColumnElement[bool], filter_json: dict[str, Any], after: int, limit: int
) -> tuple[list[int], int | None]:
    """The next keys after `after`, ascending, of items that meet `condition`, as in `key_range`, and pass the filter.

    Returns:
        Up to `limit` keys, fewer if only so many of `MAX_EXAMINED` items pass; and the key after which the next page
        begins, None: this page is the last.

    Raises:
        InvalidFilter: the filter is invalid.
    """
    found: list[int] = []
    size, examined = limit + 1, 0
    while examined < MAX_EXAMINED:
        keys = key_range(connection, item.c.id, condition, size, after)
        if len(keys):
            in_range = item.c.id.between(int(keys[0]), int(keys[-1]))
            found += sorted(passing(connection, and_(condition, in_range), filter_json))
        if len(found) > limit:
            return found[:limit], found[limit] - 1
        if len(keys) < size:
            return found, None
        after = int(keys[-1])
        examined += size
        size = min(2 * size, BLOCK)
    return found, after
