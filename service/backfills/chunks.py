"""A chunk of a backfill, for the worker that has leased it (`leasing`): read its items, `commit` the results.

Rows are locked in one order everywhere (gallery, chunk, backfill), so that workers do not deadlock. Every function runs
in its caller's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, Update, and_, false, select, update

from index.errors import RegraftError
from service.backfills.attempts import record_failures
from service.backfills.outcome import EmbeddedItems, Failed
from service.backfills.states import BackfillState, Kind
from service.backfills.waiting import QUALIFIES, VersionOrder, stored_for
from service.store.galleries.embeddings import put_embeddings
from service.store.galleries.gallery import take_seq
from service.store.rows import all_of
from service.store.sql.arrays import key_table
from service.store.tables import backfill, backfill_chunk, embedding, item
from service.store.vectors.reader import with_vectors

ORIGIN = {Kind.REENCODE: "encoded", Kind.TRANSFORM: "transformed"}


class ChunkLost(RegraftError):
    """The chunk is no longer this worker's to commit: its lease was taken over, or the backfill is not running."""

    status = 409
    code = "chunk_lost"


@dataclass(frozen=True)
class Chunk:
    """A chunk that a worker has leased; `attempts`: after how many an item is given up."""

    id: int
    owner: str
    backfill_id: int
    gallery_id: int
    version_id: int
    kind: Kind
    item_ids: tuple[int, ...]
    attempts: int


class ContentRow(NamedTuple):
    """An item to encode, as of feed number `seq`, and the blob key of its image or text."""

    id: int
    seq: int
    blob: str


class EmbeddingRow(NamedTuple):
    """An item to transform, as of feed number `seq`, and its embedding by the version it is moved from."""

    id: int
    seq: int
    version_id: int
    vector: bytes
    side: bytes | None


def own_chunk(chunk: Chunk) -> Update:
    """UPDATE of the chunk, if its owner still holds it."""
    return update(backfill_chunk).where(
        backfill_chunk.c.id == chunk.id,
        backfill_chunk.c.state == "leased",
        backfill_chunk.c.lease_owner == chunk.owner,
    )


def read_contents(connection: Connection, chunk: Chunk) -> list[ContentRow]:
    """The chunk's items that still qualify, each with the key of its image or text."""
    columns = (item.c.id, item.c.seq, item.c.blob)
    return all_of(ContentRow, connection.execute(select(*columns).where(_qualifying(connection, chunk))))


def read_embeddings(connection: Connection, chunk: Chunk, version_order: VersionOrder) -> list[EmbeddingRow]:
    """The chunk's items that still qualify, each with the embedding to transform, see `read_version`."""
    columns = (item.c.id, item.c.seq, embedding.c.version_id, embedding.c.vector, embedding.c.side)
    stored = item.join(embedding, stored_for(Kind.TRANSFORM, chunk.version_id, version_order))
    found = connection.execute(select(*columns).select_from(stored).where(_qualifying(connection, chunk)))
    return with_vectors(connection, all_of(EmbeddingRow, found), "vector")


def remaining_items(connection: Connection, chunk: Chunk) -> list[int]:
    """The chunk's items that still qualify."""
    return list(connection.execute(select(item.c.id).where(_qualifying(connection, chunk))).scalars())


def commit(
    connection: Connection, chunk: Chunk, moved: Sequence[EmbeddedItems], failed: Sequence[Failed]
) -> dict[str, int]:
    """Write the results of the chunk's items that have not changed since they were read, and end the chunk.

    Returns the counts done, failed, skipped and retried; `retried` items are to be planned again.

    Raises:
        ChunkLost: another worker holds the chunk, or its backfill was paused, cancelled or deleted; nothing is written.
        UnknownGallery: the gallery was deleted.
    """
    take_seq(connection, chunk.gallery_id, 0)
    if not connection.execute(own_chunk(chunk).values(state="done", lease_owner=None, lease_until=None)).rowcount:
        raise ChunkLost("another worker took the chunk over")
    unchanged = _unchanged(connection, moved, failed)
    failed = [f for f in failed if f.item_id in unchanged]
    unchanged_moved = [m.only(unchanged) for m in moved]
    done = write_moved(connection, chunk.gallery_id, chunk.version_id, chunk.kind, unchanged_moved)
    given_up = record_failures(connection, chunk.backfill_id, chunk.item_ids, failed, chunk.attempts)
    counts = {"done": done, "failed": given_up, "skipped": len(chunk.item_ids) - done - len(failed)}
    increments = {name: backfill.c[name] + count for name, count in {**counts, "revision": 1}.items()}
    running = update(backfill).where(backfill.c.id == chunk.backfill_id, backfill.c.state == BackfillState.RUNNING)
    if not connection.execute(running.values(increments)).rowcount:
        raise ChunkLost("the backfill is not running")
    return {**counts, "retried": len(failed) - given_up}


def _qualifying(connection: Connection, chunk: Chunk) -> ColumnElement[bool]:
    condition = item.c.id.in_(key_table(connection, chunk.item_ids).keys)
    return and_(condition, item.c.deleted == false(), QUALIFIES[chunk.kind](chunk.version_id))


def _unchanged(connection: Connection, moved: Sequence[EmbeddedItems], failed: Sequence[Failed]) -> set[int]:
    """The items not written since they were read: every write, also a deletion, sets a new seq."""
    read_at = {f.item_id: f.seq for f in failed}
    for each in moved:
        read_at.update(zip(each.item_ids, each.seqs, strict=True))
    condition = item.c.id.in_(key_table(connection, list(read_at)).keys)
    statement = select(item.c.id, item.c.seq).where(condition, item.c.deleted == false())
    return {key for key, seq in connection.execute(statement).all() if read_at[key] == seq}


def write_moved(
    connection: Connection, gallery_id: int, version_id: int, kind: Kind, moved: Sequence[EmbeddedItems]
) -> int:
    """Store new embeddings with new feed numbers, for replicas; returns how many. Raises UnknownGallery."""
    count = sum(len(each.item_ids) for each in moved)
    seq = take_seq(connection, gallery_id, count)
    for each in moved:
        arrays = (each.vectors, each.side, each.uncertainty)
        put_embeddings(connection, gallery_id, version_id, ORIGIN[kind], each.item_ids, *arrays)
        keys = key_table(connection, each.item_ids)
        connection.execute(update(item).where(item.c.id == keys.key).values(seq=seq + keys.place))
        seq += len(each.item_ids)
    return count
