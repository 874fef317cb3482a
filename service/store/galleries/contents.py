"""The contents of a gallery for its load, without vectors: read in blocks, each column as one JSON value.

The database driver alone takes a second for a million rows. With JSON, the database encodes a block while Python
processes the previous one, and orjson parses it.
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
from service.store.sql.partitioned import of_item
from service.store.tables import embedding, item
from service.store.vectors.codec import NO_DIGEST, STORED_DIGEST, digests_from_hex

ITEMS_PER_BLOCK = 10_000


def gallery_contents(connection: Connection, gallery_id: int, name_of: Callable[[int], str]) -> Iterator[Contents]:
    """The contents of all live items, ascending by key; each item is in one block with all its embeddings.

    Args:
        connection: in a snapshot.
        gallery_id: the gallery.
        name_of: version id -> its name.
    """
    after = 0
    while len((block := _block(connection, gallery_id, after, name_of)).keys_N):
        yield block
        after = int(block.keys_N[-1])


def _block(connection: Connection, gallery_id: int, after: int, name_of: Callable[[int], str]) -> Contents:
    sqlite = connection.dialect.name == "sqlite"
    as_array = func.json_group_array if sqlite else func.json_agg
    live = (item.c.gallery_id == gallery_id, item.c.id > after, item.c.deleted == false())
    # No other columns, as the database copies all columns of the rows that it sorts.
    columns = (item.c.id, cast(item.c.metadata, Text).label("document"), item.c.external_id, item.c.seq)
    block = select(*columns).where(*live).order_by(item.c.id).limit(ITEMS_PER_BLOCK).subquery()
    row = connection.execute(select(*(cast(as_array(column), Text) for column in block.c))).one()
    keys_read, documents, ids, seqs = (orjson.loads(column or "[]") for column in row)
    keys = np.array(keys_read, np.int64)
    shards: dict[ShardKey, ShardColumns] = {}
    if len(keys):
        # Twice as fast as one statement that joins both, and keeps items without embeddings.
        hex_digits: Any = func.hex(embedding.c.digest) if sqlite else func.encode(embedding.c.digest, "hex")
        has_digest = func.length(embedding.c.digest) == STORED_DIGEST.itemsize
        digest = case((has_digest, hex_digits), else_=NO_DIGEST)
        join_texts = func.group_concat if sqlite else func.string_agg
        place = (embedding.c.version_id, embedding.c.origin)
        rows = connection.execute(
            select(*place, cast(as_array(item.c.id), Text), join_texts(digest, ""))
            .join_from(item, embedding, of_item())
            .where(*live, item.c.id <= int(keys[-1]))
            .group_by(*place)
        )
        for version_id, origin, item_keys, digests in rows:
            positions = np.searchsorted(keys, np.array(orjson.loads(item_keys), np.int64))
            shards[name_of(version_id), origin] = ShardColumns(positions, digests_from_hex(digests))
    texts, ends = joined_texts([document.encode() for document in documents], [name.encode() for name in ids])
    return Contents(keys, np.array(seqs, np.int64), np.frombuffer(texts, np.uint8), ends, shards)
