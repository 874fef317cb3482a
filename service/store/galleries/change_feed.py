"""The change feed of a gallery: its items and their embeddings, in the order in which they changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sqlalchemy import Connection, Text, cast, false, select

from service.store.database.connections import STREAMED
from service.store.sql.arrays import blocks, key_table
from service.store.sql.partitioned import of_item
from service.store.tables import embedding, item
from service.store.vectors.codec import any_location, is_location
from service.store.vectors.reader import read_vectors

FEED_BLOCK = 10_000

FeedRow = tuple[int, int | None, str | None, bytes | None, str, str, int, bool]
"""A row of the change feed, with one embedding of an item; see `changes`."""

FillFromMemory = Callable[[Sequence[FeedRow]], Sequence[bytes | None]]
"""For feed rows whose vectors are in files, returns their vectors if they are in memory, else the stored locations."""

_FEED = select(
    item.c.id,
    *(embedding.c.version_id, embedding.c.origin, embedding.c.vector),
    *(cast(item.c.metadata, Text), item.c.external_id, item.c.seq, item.c.deleted),
).select_from(item.outerjoin(embedding, of_item()))
"""The SELECT of `FeedRow`s."""


def changes(
    connection: Connection, gallery_id: int, after: int, fill_from_memory: FillFromMemory | None = None
) -> Iterator[Sequence[FeedRow]]:
    """The feed after number `after`: (id, version_id, origin, vector, metadata as JSON, external_id, seq, deleted).

    One row for each embedding of an item, or one without version, origin and vector if it has none, as deleted items
    do; items deleted up to `purged_seq` may be missing. The rows of an item are in one block. Vectors in files are
    read, except those that `fill_from_memory` returns.
    """
    statement = _FEED.where(item.c.gallery_id == gallery_id, item.c.seq > after).order_by(item.c.seq, item.c.id)
    # A complete load does not need the tombstones, of which there may be many.
    if after == 0:
        statement = statement.where(item.c.deleted == false())
    last: list[FeedRow] = []  # the rows so far of the last item
    with connection.execute(statement, execution_options=STREAMED) as streamed:  # the caller may stop before the end
        for block in streamed.partitions(FEED_BLOCK):
            rows = [*last, *block]
            cut = next(number for number, row in enumerate(rows) if row[0] == rows[-1][0])
            last = rows[cut:]
            if cut:
                yield _with_vectors(connection, rows[:cut], fill_from_memory)
    if last:
        yield _with_vectors(connection, last, fill_from_memory)


def feed_of(connection: Connection, gallery_id: int, keys: Sequence[int]) -> Iterator[Sequence[FeedRow]]:
    """The rows of these items of a gallery, as `changes` yields them, in blocks."""
    for block in blocks(keys):
        statement = _FEED.where(item.c.gallery_id == gallery_id, item.c.id.in_(key_table(connection, block).keys))
        if found := connection.execute(statement.order_by(item.c.id)).all():
            yield _with_vectors(connection, found)


def _with_vectors(
    connection: Connection, rows: Sequence[FeedRow], fill_from_memory: FillFromMemory | None = None
) -> Sequence[FeedRow]:
    """Replace locations in files by their vectors."""
    stored = [row[3] for row in rows]
    if not any_location(stored):
        return rows
    in_files = [n for n, value in enumerate(stored) if is_location(value)]
    if fill_from_memory is not None:
        for n, value in zip(in_files, fill_from_memory([rows[n] for n in in_files]), strict=True):
            stored[n] = value
    read = read_vectors(connection, stored)
    return [(*row[:3], vector, *row[4:]) for row, vector in zip(rows, read, strict=True)]
