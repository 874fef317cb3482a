"""The chunks of a backfill, as a worker uses them: claim with a lease, read, commit.

Rows are locked in one order everywhere - gallery, chunk, backfill - so workers never wait for each other in a circle.
Every function runs in its caller's transaction.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Update,
    and_,
    case,
    false,
    or_,
    select,
    update,
)

from index.errors import RegraftError
from service.backfills.attempts import note_failed
from service.backfills.outcome import EmbeddedItems, Failed
from service.backfills.planner import MAX_PAUSE_SECONDS, QUALIFIES, BackfillState, Kind, Order, stored_for
from service.store.embeddings import put_embeddings
from service.store.repository import take_seq
from service.store.rows import BackfillRow, all_of, first_of, one_of
from service.store.sql_arrays import listed
from service.store.tables import backfill, backfill_chunk, embedding, item
from service.store.vector_reader import with_vectors

BURST_SECONDS = 1.0
"""How much of an unused rate may be made up for at once."""
PACE_AHEAD = 8
"""Chunks that workers can have claimed of a rated backfill at the same instant."""
LONGEST_LEASES = 4
"""A lease that ends further ahead than so many of the claimer's was given before the clock was set back."""
ORIGIN = {Kind.REENCODE: "encoded", Kind.TRANSFORM: "transformed"}


class ChunkLost(RegraftError):
    """The chunk is no longer this worker's to commit: its lease was taken over, or the backfill is not running."""

    status = 409
    code = "chunk_lost"


@dataclass(frozen=True)
class Chunk:
    """Items one worker has leased."""

    id: int
    owner: str
    backfill_id: int
    gallery_id: int
    version_id: int
    kind: Kind
    item_ids: tuple[int, ...]
    attempts: int


class ChunkRow(NamedTuple):
    """Some items of a backfill."""

    id: int
    backfill_id: int
    item_ids: list[int]


CHUNK = (backfill_chunk.c.id, backfill_chunk.c.backfill_id, backfill_chunk.c.item_ids)


class ContentRow(NamedTuple):
    """An item to be encoded, as it was at `seq`, and where its image or text lies."""

    id: int
    seq: int
    blob: str


class EmbeddingRow(NamedTuple):
    """An item to be transformed, as it was at `seq`, and its embedding by the version it is moved from."""

    id: int
    seq: int
    version_id: int
    vector: bytes
    side: bytes | None


# Claiming


def claimable(connection: Connection, kinds: Sequence[Kind] = tuple(Kind)) -> list[BackfillRow]:
    """The running backfills of these kinds, planned whole, whose rate allows another chunk now.

    The one that waits longest is first.
    """
    now = time.time()
    next_claim = backfill.c.next_claim
    due = or_(backfill.c.rate.is_(None), next_claim <= now, next_claim > now + _ahead(backfill.c))
    ready = (backfill.c.state == BackfillState.RUNNING, backfill.c.kind.in_(kinds), backfill.c.sweep_seq.is_(None))
    statement = select(backfill).where(*ready, due)
    return all_of(BackfillRow, connection.execute(statement.order_by(backfill.c.next_claim, backfill.c.id)))


def claim(
    connection: Connection, owner: str, lease_seconds: float, kinds: Sequence[Kind] = tuple(Kind)
) -> Chunk | None:
    """Lease the next chunk that nobody holds, or whose holder sent no heartbeat before its lease ran out."""
    for job in claimable(connection, kinds):
        taken = _take(connection, job.id, owner, lease_seconds)
        if taken is not None:
            _pace(connection, job, len(taken.item_ids))
            return _chunk(job, taken, owner)
    return None


def holders(connection: Connection, beginning: str) -> list[str]:
    """The owner of each chunk of a running backfill that is leased now, of those whose name begins so."""
    running = backfill_chunk.c.backfill_id.in_(select(backfill.c.id).where(backfill.c.state == BackfillState.RUNNING))
    held = (running, backfill_chunk.c.state == "leased", backfill_chunk.c.lease_until >= time.time())
    named = backfill_chunk.c.lease_owner.startswith(beginning, autoescape=True)
    return list(connection.execute(select(backfill_chunk.c.lease_owner).where(*held, named)).scalars())


def leased(connection: Connection, chunk_id: int, owner: str) -> Chunk:
    """A chunk by its number, as long as `owner` holds it. Raises ChunkLost."""
    mine = (backfill_chunk.c.id == chunk_id, backfill_chunk.c.state == "leased", backfill_chunk.c.lease_owner == owner)
    taken = first_of(ChunkRow, connection.execute(select(*CHUNK).where(*mine)))
    if taken is None:
        raise ChunkLost("this lease is over: the chunk is done, or another worker's")
    job = one_of(BackfillRow, connection.execute(select(backfill).where(backfill.c.id == taken.backfill_id)))
    return _chunk(job, taken, owner)


def _chunk(job: BackfillRow, taken: ChunkRow, owner: str) -> Chunk:
    items = tuple(taken.item_ids)
    return Chunk(taken.id, owner, job.id, job.gallery_id, job.version_id, Kind(job.kind), items, job.attempts)


def extend(connection: Connection, chunk: Chunk, lease_seconds: float) -> bool:
    """A heartbeat: hold the chunk for longer. False when it is no longer ours."""
    statement = _ours(chunk).values(lease_until=time.time() + lease_seconds)
    return connection.execute(statement).rowcount == 1


def release(connection: Connection, chunk: Chunk) -> None:
    """Give the chunk back undone, so that anyone may claim it at once."""
    connection.execute(_ours(chunk).values(state="todo", lease_owner=None, lease_until=None))


def leave(connection: Connection, chunk: Chunk) -> None:
    """Give up a chunk that failed: it is nobody's, and rests until its lease has run out."""
    connection.execute(_ours(chunk).values(lease_owner=None))


def _take(connection: Connection, backfill_id: int, owner: str, lease_seconds: float) -> ChunkRow | None:
    now = time.time()
    until, latest = now + lease_seconds, now + max(LONGEST_LEASES * lease_seconds, MAX_PAUSE_SECONDS)
    over = or_(backfill_chunk.c.lease_until < now, backfill_chunk.c.lease_until > latest)
    expired = and_(backfill_chunk.c.state == "leased", over)
    # Two statements and no OR: each is answered from the index, however many chunks there are.
    for free in (expired, backfill_chunk.c.state == "todo"):
        next_free = (
            select(backfill_chunk.c.id)
            .where(backfill_chunk.c.backfill_id == backfill_id, free)
            .order_by(backfill_chunk.c.number)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        lease = update(backfill_chunk).where(backfill_chunk.c.id == next_free.scalar_subquery())
        values = {"state": "leased", "lease_owner": owner, "lease_until": until}
        if taken := first_of(ChunkRow, connection.execute(lease.values(values).returning(*CHUNK))):
            return taken
    return None


def _pace(connection: Connection, job: BackfillRow, items: int) -> None:
    """Move the next claim on. Computed in SQL, from the column: two workers that claim at once add up."""
    now = time.time()
    moved_on: ColumnElement[float] | float = now
    if job.rate:
        possible = backfill.c.next_claim.between(now - BURST_SECONDS, now + _ahead(job))
        moved_on = case((possible, backfill.c.next_claim), else_=now - BURST_SECONDS) + items / job.rate
    connection.execute(update(backfill).where(backfill.c.id == job.id).values(next_claim=moved_on))


def _ahead(job: Any) -> Any:
    """How far claims may run ahead of the clock; further means that the clock was set back. For a row or the table."""
    return BURST_SECONDS + PACE_AHEAD * job.chunk_size / job.rate


def _ours(chunk: Chunk) -> Update:
    return update(backfill_chunk).where(
        backfill_chunk.c.id == chunk.id,
        backfill_chunk.c.state == "leased",
        backfill_chunk.c.lease_owner == chunk.owner,
    )


# Working


def read_contents(connection: Connection, chunk: Chunk) -> list[ContentRow]:
    """The chunk's items that still qualify."""
    columns = (item.c.id, item.c.seq, item.c.blob)
    return all_of(ContentRow, connection.execute(select(*columns).where(_still(connection, chunk))))


def read_embeddings(connection: Connection, chunk: Chunk, order: Order) -> list[EmbeddingRow]:
    """The chunk's items that still qualify, each with the embedding that the transform reads, see `read_version`."""
    columns = (item.c.id, item.c.seq, embedding.c.version_id, embedding.c.vector, embedding.c.side)
    stored = item.join(embedding, stored_for(Kind.TRANSFORM, chunk.version_id, order))
    found = connection.execute(select(*columns).select_from(stored).where(_still(connection, chunk)))
    return with_vectors(connection, all_of(EmbeddingRow, found), "vector")


def still_waiting(connection: Connection, chunk: Chunk) -> list[int]:
    """The chunk's items that still qualify."""
    return list(connection.execute(select(item.c.id).where(_still(connection, chunk))).scalars())


def commit(
    connection: Connection, chunk: Chunk, moved: Sequence[EmbeddedItems], failed: Sequence[Failed]
) -> dict[str, int]:
    """Write a chunk's results, of the items that are still as they were read, and count them.

    `retried` items are neither done nor failed: they wait to be planned again.

    Raises:
        ChunkLost: another worker holds the chunk, or its backfill was paused, cancelled or deleted; nothing is written.
        UnknownGallery: the gallery was deleted.
    """
    take_seq(connection, chunk.gallery_id, 0)
    if not connection.execute(_ours(chunk).values(state="done", lease_owner=None, lease_until=None)).rowcount:
        raise ChunkLost("another worker took the chunk over")
    unchanged = _unchanged(connection, moved, failed)
    failed = [f for f in failed if f.item_id in unchanged]
    kept = [m.only(unchanged) for m in moved]
    done = write_moved(connection, chunk.gallery_id, chunk.version_id, chunk.kind, kept)
    given_up = note_failed(connection, chunk.backfill_id, chunk.item_ids, failed, chunk.attempts)
    counts = {"done": done, "failed": given_up, "skipped": len(chunk.item_ids) - done - len(failed)}
    counted = {name: backfill.c[name] + count for name, count in {**counts, "revision": 1}.items()}
    running = update(backfill).where(backfill.c.id == chunk.backfill_id, backfill.c.state == BackfillState.RUNNING)
    if not connection.execute(running.values(counted)).rowcount:
        raise ChunkLost("the backfill is not running")
    return {**counts, "retried": len(failed) - given_up}


def _still(connection: Connection, chunk: Chunk) -> ColumnElement[bool]:
    mine = item.c.id.in_(listed(connection, chunk.item_ids).keys)
    return and_(mine, item.c.deleted == false(), QUALIFIES[chunk.kind](chunk.version_id))


def _unchanged(connection: Connection, moved: Sequence[EmbeddedItems], failed: Sequence[Failed]) -> set[int]:
    """The items that nobody wrote since: every write, a deletion too, stamps a new seq."""
    read_at = {f.item_id: f.seq for f in failed}
    for each in moved:
        read_at.update(zip(each.item_ids, each.seqs, strict=True))
    mine = item.c.id.in_(listed(connection, list(read_at)).keys)
    statement = select(item.c.id, item.c.seq).where(mine, item.c.deleted == false())
    return {key for key, seq in connection.execute(statement).all() if read_at[key] == seq}


def write_moved(
    connection: Connection, gallery_id: int, version_id: int, kind: Kind, moved: Sequence[EmbeddedItems]
) -> int:
    """Store new embeddings, and have every replica hear of them; returns of how many items. Raises UnknownGallery."""
    count = sum(len(each.item_ids) for each in moved)
    seq = take_seq(connection, gallery_id, count)
    for each in moved:
        arrays = (each.vectors, each.side, each.uncertainty)
        put_embeddings(connection, gallery_id, version_id, ORIGIN[kind], each.item_ids, *arrays)
        keys = listed(connection, each.item_ids)
        connection.execute(update(item).where(item.c.id == keys.key).values(seq=seq + keys.place))
        seq += len(each.item_ids)
    return count
