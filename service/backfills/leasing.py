"""Leases of chunks: `claim` the next chunk, `extend` its lease, give it back; the chunks of dead workers are halved.

Rows are locked in the order of `service.backfills.chunks`. Every function runs in its caller's transaction.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, case, insert, or_, select, update

from service.backfills.chunks import Chunk, ChunkLost, commit, own_chunk
from service.backfills.outcome import Failed
from service.backfills.states import MAX_PAUSE_SECONDS, BackfillState, Kind
from service.backfills.sweeps import next_number
from service.store.galleries.gallery import take_seq
from service.store.leases.jobs import MAX_LEASES_AHEAD
from service.store.rows import BackfillRow, all_of, first_of, one_of
from service.store.sql.database_clock import now
from service.store.tables import backfill, backfill_chunk, item

BURST_SECONDS = 1.0
"""How many seconds of an unused rate may be used at once."""
PACE_AHEAD = 8
"""Chunks of a backfill with a rate that workers may claim at the same instant."""
DIED = "the worker that had it died, or was cut off: of lack of memory, perhaps"
REMOTE = "remote:"
"""The prefix of owners that are remote workers; the worker's own name follows."""


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
    statement = own_chunk(chunk).values(lease_until=now() + lease_seconds)
    return connection.execute(statement).rowcount == 1


def release(connection: Connection, chunk: Chunk) -> None:
    """Give an unfinished chunk back, so that any worker may claim it at once."""
    connection.execute(own_chunk(chunk).values(state="todo", lease_owner=None, lease_until=None))


def abandon(connection: Connection, chunk: Chunk) -> None:
    """Give back a chunk that failed: it can be claimed again when its lease has expired."""
    connection.execute(own_chunk(chunk).values(lease_owner=None))


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
