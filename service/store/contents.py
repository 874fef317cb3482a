"""What a gallery holds, for a start: everything but the vectors, read in blocks that are one value each.

Rows by the million cost a second a million in the driver alone. As JSON the database writes a block beside Python's own
work, and orjson reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from sqlalchemy import Connection, Text, cast, false, func, select

from service.store.sql_arrays import listed
from service.store.tables import embedding, item
from service.store.vector_codec import NO_DIGEST

ITEMS = 10_000
"""Items in a block."""

ContentRow = tuple[int, int | None, str | None, str | None, str, str, int, bool]
"""As `FeedRow`, with the digest in hexadecimal digits in the place of the vector."""


def contents(connection: Connection, gallery_id: int) -> Iterator[Sequence[ContentRow]]:
    """Everything that live items hold: (id, version_id, origin, digest, metadata, external_id, seq, deleted).

    By key; the rows of an item are in one block. An item that holds nothing has one row without version and origin.
    """
    after = 0
    while block := _block(connection, gallery_id, after):
        yield block
        after = block[-1][0]


def vectors_of(connection: Connection, version_id: int, keys: Sequence[int]) -> dict[int, bytes]:
    """Key -> the vector it holds of a version."""
    mine = (embedding.c.version_id == version_id, embedding.c.item_id.in_(listed(connection, keys).keys))
    found = connection.execute(select(embedding.c.item_id, embedding.c.vector).where(*mine))
    return {row[0]: row[1] for row in found}


def _block(connection: Connection, gallery_id: int, after: int) -> list[ContentRow]:
    sqlite = connection.dialect.name == "sqlite"
    digits: Any = func.hex(embedding.c.digest) if sqlite else func.encode(embedding.c.digest, "hex")
    digest = func.coalesce(func.nullif(digits, ""), NO_DIGEST)  # SQLite writes no digits for null
    mine = (item.c.gallery_id == gallery_id, item.c.id > after, item.c.deleted == false())
    some = select(item).where(*mine).order_by(item.c.id).limit(ITEMS).subquery()
    columns = (embedding.c.version_id, embedding.c.origin, digest, cast(some.c.metadata, Text), some.c.external_id)
    array, gathered = (func.json_array, func.json_group_array) if sqlite else (func.json_build_array, func.json_agg)
    whole = cast(gathered(array(some.c.id, *columns, some.c.seq, some.c.deleted)), Text)
    found = connection.execute(
        select(whole).select_from(some.outerjoin(embedding, embedding.c.item_id == some.c.id))
    ).scalar_one()
    rows: list[ContentRow] = orjson.loads(found) if found else []
    rows.sort(key=_key)
    return rows


def _key(row: ContentRow) -> int:
    return row[0]
