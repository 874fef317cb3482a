"""Which of some items pass a metadata filter, read from the database; queries ask the gallery's memory instead."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, cast, literal, select

from index.filter import parse_filter
from index.metadata import Item, Metadata
from service.store.repository import STREAMED
from service.store.tables import item

ROWS = 4096
"""Items in memory at a time."""


def passing(
    connection: Connection, among: ColumnElement[bool], given: dict[str, Any], version: ColumnElement[Any] | None = None
) -> dict[int, int]:
    """Key -> `version`, by default 0, of the rows of `item` that `among` takes and the filter lets pass.

    Raises:
        InvalidFilter: it is no filter.
    """
    where = parse_filter(given)
    found: dict[int, int] = {}
    columns = (item.c.id, literal(0) if version is None else version, cast(item.c.metadata, Text))
    rows = connection.execute(select(*columns).where(among), execution_options=STREAMED)
    for block in rows.partitions(ROWS):
        store = Metadata()
        slots = store.put([row[0] for row in block], {row[0]: Item(row[2]) for row in block})
        passed = store.select(where)[slots]
        found.update((row[0], row[1]) for row, good in zip(block, passed.tolist(), strict=True) if good)
    return found
