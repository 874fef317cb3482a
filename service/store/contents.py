"""What a gallery holds, for a start: everything but the vectors, read in blocks of columns that are one value each.

Rows by the million cost a second a million in the driver alone. As JSON the database writes a block beside Python's own
work, and orjson reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Text, case, cast, false, func, select

from service.store.sql_arrays import listed
from service.store.tables import embedding, item
from service.store.vector_codec import NO_DIGEST, STORED_DIGEST

ITEMS = 10_000
"""Items in a block."""


class Contents(NamedTuple):
    """Some live items (N,), by key, and what they hold.

    Attributes:
        keys: of the items.
        metadata: JSON texts.
        ids: what their user calls them.
        seqs: the number of each one's last write in the change feed.
        held: (version_id, origin) -> the keys of those that hold such an embedding, and their digests as hexadecimal
            digits, one behind the other.
    """

    keys: list[int]
    metadata: list[str]
    ids: list[str]
    seqs: list[int]
    held: dict[tuple[int, str], tuple[list[int], str]]


def contents(connection: Connection, gallery_id: int) -> Iterator[Contents]:
    """Everything that live items hold, by key; all of an item is in one block."""
    after = 0
    while (block := _block(connection, gallery_id, after)).keys:
        yield block
        after = block.keys[-1]


def vectors_of(connection: Connection, version_id: int, keys: Sequence[int]) -> dict[int, bytes]:
    """Key -> the vector it holds of a version."""
    mine = (embedding.c.version_id == version_id, embedding.c.item_id.in_(listed(connection, keys).keys))
    found = connection.execute(select(embedding.c.item_id, embedding.c.vector).where(*mine))
    return {row[0]: row[1] for row in found}


def _block(connection: Connection, gallery_id: int, after: int) -> Contents:
    sqlite = connection.dialect.name == "sqlite"
    gathered = func.json_group_array if sqlite else func.json_agg
    live = (item.c.gallery_id == gallery_id, item.c.id > after, item.c.deleted == false())
    # Only what is gathered: the database copies each column of the rows it puts in order.
    columns = (item.c.id, cast(item.c.metadata, Text).label("document"), item.c.external_id, item.c.seq)
    some = select(*columns).where(*live).order_by(item.c.id).limit(ITEMS).subquery()
    row = connection.execute(select(*(cast(gathered(column), Text) for column in some.c))).one()
    keys, documents, ids, seqs = (orjson.loads(column or "[]") for column in row)
    if not keys:
        return Contents([], [], [], [], {})
    # Twice as fast as one statement that joins both, and keeps items that hold nothing.
    digits: Any = func.hex(embedding.c.digest) if sqlite else func.encode(embedding.c.digest, "hex")
    noted = func.length(embedding.c.digest) == STORED_DIGEST.itemsize
    digest, joined = case((noted, digits), else_=NO_DIGEST), func.group_concat if sqlite else func.string_agg
    place = (embedding.c.version_id, embedding.c.origin)
    found = connection.execute(
        select(*place, cast(gathered(item.c.id), Text), joined(digest, ""))
        .join_from(item, embedding, embedding.c.item_id == item.c.id)
        .where(*live, item.c.id <= keys[-1])
        .group_by(*place)
    )
    return Contents(keys, documents, ids, seqs, {(row[0], row[1]): (orjson.loads(row[2]), row[3]) for row in found})
