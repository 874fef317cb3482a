"""Chunks of a backfill for workers: `claim` with a lease, read, `commit`.

Rows are locked in one order everywhere (gallery, chunk, backfill), so that workers do not deadlock. Every function runs
in its caller's transaction.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Update,
    and_,
    case,
    false,
    insert,
    or_,
    select,
    update,
)

from index.errors import RegraftError
from service.backfills.attempts import record_failures
from service.backfills.outcome import EmbeddedItems, Failed
from service.backfills.states import MAX_PAUSE_SECONDS, BackfillState, Kind
from service.backfills.sweeps import next_number
from service.backfills.waiting import QUALIFIES, Order, stored_for
from service.store.galleries.embeddings import put_embeddings
from service.store.galleries.gallery import take_seq
from service.store.leases.jobs import MAX_LEASES_AHEAD
from service.store.rows import BackfillRow, all_of, first_of, one_of
from service.store.sql.arrays import key_table
from service.store.sql.database_clock import now
from service.store.tables import backfill, backfill_chunk, embedding, item
from service.store.vectors.reader import with_vectors

BURST_SECONDS = 1.0
"""How many seconds of an unused rate may be used at once."""
PACE_AHEAD = 8
"""Chunks of a backfill with a rate that workers may claim at the same instant."""
DIED = "the worker that had it died, or was cut off: of lack of memory, perhaps"
REMOTE = "remote:"
"""The prefix of owners that are remote workers; the worker's own name follows."""
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


class ChunkRow(NamedTuple):
    """A row of `backfill_chunk`."""

    id: int
    backfill_id: int
    item_ids: list[int]


CHUNK = (backfill_chunk.c.id, backfill_chunk.c.backfill_id, backfill_chunk.c.item_ids)


class ExpiredChunkRow(NamedTuple):
    """A chunk whose lease has expired; `long_over`: by more than the length of a lease."""

    id: int
    backfill_id: int
    item_ids: list[int]
    lease_owner: str
    long_over: bool


EXPIRED_CHUNK = (*CHUNK, backfill_chunk.c.lease_owner)


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


# Claiming


def claimable(connection: Connection, kinds: Sequence[Kind] = tuple(Kind)) -> list[BackfillRow]:
    """The running, completely planned backfills of these kinds whose rate allows another chunk; longest wait first."""
    next_claim = backfill.c.next_claim
    due = or_(backfill.c.rate.is_(None), next_claim <= now(), next_claim > now() + _max_ahead(backfill.c))
    ready = (backfill.c.state == BackfillState.RUNNING, backfill.c.kind.in_(kinds), backfill.c.sweep_seq.is_(None))
    statement = select(backfill).where(*ready, due)
    return all_of(BackfillRow, connection.execute(statement.order_by(backfill.c.next_claim, backfill.c.id)))


def claim(
    connection: Connection, owner: str, lease_seconds: float, kinds: Sequence[Kind] = tuple(Kind)
) -> Chunk | None:
    """Lease the next chunk that is free or whose lease expired without a heartbeat; None: there is none."""
    for job in claimable(connection, kinds):
        _free_lost(connection, job, lease_seconds)
        row = _lease_next(connection, job.id, owner, lease_seconds)
        if row is not None:
            _move_next_claim(connection, job, len(row.item_ids))
            return _chunk(job, row, owner)
    return None


def lease_owners(connection: Connection, beginning: str) -> list[str]:
    """The owner of each leased chunk of running backfills, if its name starts with `beginning`."""
    running = backfill_chunk.c.backfill_id.in_(select(backfill.c.id).where(backfill.c.state == BackfillState.RUNNING))
    held = (running, backfill_chunk.c.state == "leased", backfill_chunk.c.lease_until >= now())
    named = backfill_chunk.c.lease_owner.startswith(beginning, autoescape=True)
    return list(connection.execute(select(backfill_chunk.c.lease_owner).where(*held, named)).scalars())


def leased_chunk(connection: Connection, chunk_id: int, owner: str) -> Chunk:
    """A chunk by its number, if `owner` holds it. Raises ChunkLost."""
    conditions = (
        backfill_chunk.c.id == chunk_id,
        backfill_chunk.c.state == "leased",
        backfill_chunk.c.lease_owner == owner,
    )
    row = first_of(ChunkRow, connection.execute(select(*CHUNK).where(*conditions)))
    if row is None:
        raise ChunkLost("the lease expired: the chunk is done or claimed by another worker")
    job = one_of(BackfillRow, connection.execute(select(backfill).where(backfill.c.id == row.backfill_id)))
    return _chunk(job, row, owner)


def _chunk(job: BackfillRow, row: ChunkRow | ExpiredChunkRow, owner: str) -> Chunk:
    items = tuple(row.item_ids)
    return Chunk(row.id, owner, job.id, job.gallery_id, job.version_id, Kind(job.kind), items, job.attempts)


def extend(connection: Connection, chunk: Chunk, lease_seconds: float) -> bool:
    """Extend the lease (a heartbeat). False: another worker has the chunk."""
    statement = _own_chunk(chunk).values(lease_until=now() + lease_seconds)
    return connection.execute(statement).rowcount == 1


def release(connection: Connection, chunk: Chunk) -> None:
    """Give an unfinished chunk back, so that any worker may claim it at once."""
    connection.execute(_own_chunk(chunk).values(state="todo", lease_owner=None, lease_until=None))


def abandon(connection: Connection, chunk: Chunk) -> None:
    """Give back a chunk that failed: it can be claimed again when its lease has expired."""
    connection.execute(_own_chunk(chunk).values(lease_owner=None))


def worker_of(owner: str) -> str:
    """The worker of an owner; a remote worker has another owner for each lease."""
    return owner.rpartition(":")[0] if owner.startswith(REMOTE) else owner


def _free_lost(connection: Connection, job: BackfillRow, lease_seconds: float) -> None:
    """Free the chunks of dead workers in halves, so that an item that kills its worker is isolated.

    A single item counts as failed if its worker held no other chunk that could be the cause.
    """
    leased_chunk = (backfill_chunk.c.state == "leased", backfill_chunk.c.lease_owner.is_not(None))
    expired = (backfill_chunk.c.backfill_id == job.id, *leased_chunk, backfill_chunk.c.lease_until < now())
    if connection.execute(select(backfill_chunk.c.id).where(*expired).limit(1)).first() is None:
        return
    take_seq(connection, job.gallery_id, 0)
    long_over = (backfill_chunk.c.lease_until < now() - lease_seconds).label("long_over")
    rows = (
        select(*EXPIRED_CHUNK, long_over)
        .where(*expired)
        .order_by(backfill_chunk.c.number)
        .with_for_update(skip_locked=True)
    )
    alive = {worker_of(owner) for owner in lease_owners(connection, "")}
    # The leases of a dead worker expire one by one, all within the length of a lease.
    lost = [
        row
        for row in all_of(ExpiredChunkRow, connection.execute(rows))
        if worker_of(row.lease_owner) not in alive or row.long_over
    ]
    lost_by_worker = Counter(worker_of(row.lease_owner) for row in lost)
    numbers = itertools.count(next_number(connection, job.id))
    # Appended after all others, in reverse: chunks lost together are not claimed in the same sequence again.
    for row in reversed(lost):
        if len(row.item_ids) == lost_by_worker[worker_of(row.lease_owner)] == 1:
            _fail_alone(connection, job, row)
        else:
            _halve(connection, row, numbers)


def _fail_alone(connection: Connection, job: BackfillRow, row: ExpiredChunkRow) -> None:
    (item_id,) = row.item_ids
    seq = connection.execute(select(item.c.seq).where(item.c.id == item_id)).scalar_one()
    commit(connection, _chunk(job, row, row.lease_owner), [], [Failed(item_id, seq, DIED, "worker_died", retry=True)])


def _halve(connection: Connection, row: ExpiredChunkRow, numbers: Iterator[int]) -> None:
    half = (len(row.item_ids) + 1) // 2
    values = {"state": "todo", "number": next(numbers), "item_ids": row.item_ids[:half]}
    statement = update(backfill_chunk).where(backfill_chunk.c.id == row.id)
    connection.execute(statement.values(lease_owner=None, lease_until=None, **values))
    if second_half := row.item_ids[half:]:
        second = {**values, "number": next(numbers), "item_ids": second_half}
        connection.execute(insert(backfill_chunk).values(backfill_id=row.backfill_id, **second))


def _lease_next(connection: Connection, backfill_id: int, owner: str, lease_seconds: float) -> ChunkRow | None:
    until, latest = now() + lease_seconds, now() + max(MAX_LEASES_AHEAD * lease_seconds, MAX_PAUSE_SECONDS)
    abandoned = and_(backfill_chunk.c.lease_owner.is_(None), backfill_chunk.c.lease_until < now())
    claimable_again = or_(abandoned, backfill_chunk.c.lease_until > latest)
    expired = and_(backfill_chunk.c.state == "leased", claimable_again)
    # Two statements instead of an OR: each uses the index, however many chunks there are.
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


def _move_next_claim(connection: Connection, job: BackfillRow, items: int) -> None:
    """Advance the time of the next claim. Computed in SQL from the column, so that concurrent claims add up."""
    next_claim: ColumnElement[float] = now()
    if job.rate:
        possible = backfill.c.next_claim.between(now() - BURST_SECONDS, now() + _max_ahead(job))
        next_claim = case((possible, backfill.c.next_claim), else_=now() - BURST_SECONDS) + items / job.rate
    connection.execute(update(backfill).where(backfill.c.id == job.id).values(next_claim=next_claim))


def _max_ahead(job: Any) -> Any:
    """Seconds that claims may run ahead of the clock; more: the clock was set back. `job`: a row, or the columns."""
    return BURST_SECONDS + PACE_AHEAD * job.chunk_size / job.rate


def _own_chunk(chunk: Chunk) -> Update:
    return update(backfill_chunk).where(
        backfill_chunk.c.id == chunk.id,
        backfill_chunk.c.state == "leased",
        backfill_chunk.c.lease_owner == chunk.owner,
    )


# Working


def read_contents(connection: Connection, chunk: Chunk) -> list[ContentRow]:
    """The chunk's items that still qualify, each with the key of its image or text."""
    columns = (item.c.id, item.c.seq, item.c.blob)
    return all_of(ContentRow, connection.execute(select(*columns).where(_qualifying(connection, chunk))))


def read_embeddings(connection: Connection, chunk: Chunk, order: Order) -> list[EmbeddingRow]:
    """The chunk's items that still qualify, each with the embedding to transform, see `read_version`."""
    columns = (item.c.id, item.c.seq, embedding.c.version_id, embedding.c.vector, embedding.c.side)
    stored = item.join(embedding, stored_for(Kind.TRANSFORM, chunk.version_id, order))
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
    if not connection.execute(_own_chunk(chunk).values(state="done", lease_owner=None, lease_until=None)).rowcount:
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
