"""What a gallery holds, for a start: everything but the vectors, read in blocks of columns that are one value each.

Rows by the million cost a second a million in the driver alone. As JSON the database writes a block beside Python's own
work, and orjson reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orjson
from sqlalchemy import Connection, Text, case, cast, false, func, select

from index.contents import Contents, ShardColumns
from index.item_table import joined_texts
from index.version import ShardKey
from service.store.partitioned import of_item
from service.store.tables import embedding, item
from service.store.vector_codec import NO_DIGEST, STORED_DIGEST, digests_from_hex

ITEMS = 10_000
"""Items in a block."""


def contents(connection: Connection, gallery_id: int, name_of: Callable[[int], str]) -> Iterator[Contents]:
    """Everything that live items hold, by key; all of an item is in one block. `name_of` a version's number."""
    after = 0
    while len((block := _block(connection, gallery_id, after, name_of)).keys_N):
        yield block
        after = int(block.keys_N[-1])


def _block(connection: Connection, gallery_id: int, after: int, name_of: Callable[[int], str]) -> Contents:
    sqlite = connection.dialect.name == "sqlite"
    gathered = func.json_group_array if sqlite else func.json_agg
    live = (item.c.gallery_id == gallery_id, item.c.id > after, item.c.deleted == false())
    # Only what is gathered: the database copies each column of the rows it puts in order.
    columns = (item.c.id, cast(item.c.metadata, Text).label("document"), item.c.external_id, item.c.seq)
    some = select(*columns).where(*live).order_by(item.c.id).limit(ITEMS).subquery()
    row = connection.execute(select(*(cast(gathered(column), Text) for column in some.c))).one()
    keys, documents, ids, seqs = (orjson.loads(column or "[]") for column in row)
    there = np.array(keys, np.int64)
    held: dict[ShardKey, ShardColumns] = {}
    if keys:
        # Twice as fast as one statement that joins both, and keeps items that hold nothing.
        digits: Any = func.hex(embedding.c.digest) if sqlite else func.encode(embedding.c.digest, "hex")
        noted = func.length(embedding.c.digest) == STORED_DIGEST.itemsize
        digest, joined = case((noted, digits), else_=NO_DIGEST), func.group_concat if sqlite else func.string_agg
        place = (embedding.c.version_id, embedding.c.origin)
        found = connection.execute(
            select(*place, cast(gathered(item.c.id), Text), joined(digest, ""))
            .join_from(item, embedding, of_item())
            .where(*live, item.c.id <= keys[-1])
            .group_by(*place)
        )
        for version_id, origin, holders, digests in found:
            places = np.searchsorted(there, np.array(orjson.loads(holders), np.int64))
            held[name_of(version_id), origin] = ShardColumns(places, digests_from_hex(digests))
    texts, places = joined_texts([document.encode() for document in documents], [one.encode() for one in ids])
    return Contents(there, np.array(seqs, np.int64), np.frombuffer(texts, np.uint8), places, held)
