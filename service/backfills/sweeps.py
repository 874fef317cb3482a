"""Sweeps cut a backfill into chunks, in short transactions, so that writes never wait long; start at `continue_sweep`.

A sweep plans the items as of one number of the gallery's feed, each at most once; items written later wait for the next
sweep. The first begins with the backfill, another whenever all chunks are done. A sweep that finds nothing ends the
backfill, unless items were written since. Chunks are claimed only after the sweep, so no item moves during it.

Each transaction that writes chunks also stores the sweep's progress in the backfill's row. So a sweep may be killed,
paused or cancelled at any point, and two processes that continue the same one plan no item twice: the slower one finds
the row changed and stops.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Update,
    and_,
    exists,
    func,
    insert,
    not_,
    or_,
    select,
    true,
    update,
)

from index.evaluation.ordering import PendingItems, backfill_order
from service.backfills.attempts import items_to_move, next_retries
from service.backfills.scores import ItemScores, read_scores
from service.backfills.states import BackfillState, Kind, change_state, drained
from service.backfills.waiting import VersionOrder, capped_count, served_origin, waiting_items
from service.store.database.connections import Database
from service.store.galleries.gallery import take_seq
from service.store.galleries.ranges import KEYS_PER_RANGE, Keys, keys_by_age, regroup, take
from service.store.leases.heartbeats import Leases
from service.store.leases.jobs import is_expired
from service.store.rows import BackfillRow, all_of, first_of, one_of
from service.store.sql.arrays import key_table, select_keys
from service.store.sql.database_clock import now
from service.store.tables import backfill, backfill_chunk, backfill_failure, item, item_traffic

BY_AGE = ("oldest", "newest")
"""Orders that need no sorting, as keys are read by age."""
CHUNKS = 512
"""Most chunks per transaction, which holds at most `KEYS_PER_RANGE` items (but at least one chunk)."""
PAUSE_SECONDS = 0.25
"""The longest pause between two such transactions."""
LEASE_SECONDS = 30.0
"""How long a process holds a sweep without a heartbeat."""


def _matches(among: ColumnElement[bool], _: VersionOrder) -> Select[Any]:
    counted = select(item.c.id, item_traffic.c.matches).join(item_traffic, item_traffic.c.item_id == item.c.id)
    return counted.where(among)


def _transformed(among: ColumnElement[bool], version_order: VersionOrder) -> Select[Any]:
    return select(item.c.id, true()).where(among, served_origin(version_order, "transformed"))


SCORE_QUERIES: dict[str, Callable[[ColumnElement[bool], VersionOrder], Select[Any]]] = {
    "traffic": _matches,
    "transformed": _transformed,
}
"""Item order -> SELECT of the keys and scores of items; items without a score come last."""


def new_sweep_columns(seq: int) -> dict[str, Any]:
    """The columns of a backfill at the beginning of a sweep; `seq`: the next number of the gallery's feed.

    The process that begins it holds its lease.
    """
    return {"sweep_seq": seq, "sweep_at": 0, "sweep_until": now() + LEASE_SECONDS}


def begin_next_sweep(connection: Connection, backfill_id: int) -> BackfillRow | None:
    """Begin the next sweep of a backfill whose chunks are done; None: another process was faster, or it was deleted."""
    gallery_id = connection.execute(select(backfill.c.gallery_id).where(backfill.c.id == backfill_id)).scalar()
    if gallery_id is None:
        return None
    seq = take_seq(connection, gallery_id, 0)
    if backfill_id not in drained(connection):
        return None
    values = {**new_sweep_columns(seq), "revision": backfill.c.revision + 1}
    begun = update(backfill).where(backfill.c.id == backfill_id).values(values).returning(backfill)
    return one_of(BackfillRow, connection.execute(begun))


def abandoned_sweeps(connection: Connection) -> list[BackfillRow]:
    """The running backfills whose sweep has no valid lease."""
    until = backfill.c.sweep_until
    is_free = or_(until.is_(None), is_expired(until, LEASE_SECONDS))
    conditions = (backfill.c.state == BackfillState.RUNNING, backfill.c.sweep_seq.is_not(None), is_free)
    return all_of(BackfillRow, connection.execute(select(backfill).where(*conditions).order_by(backfill.c.id)))


def take_sweep(connection: Connection, job: BackfillRow) -> BackfillRow | None:
    """Take the lease of the sweep of this row; None: another process was faster."""
    until = backfill.c.sweep_until
    unchanged = until.is_(None) if job.sweep_until is None else until == job.sweep_until
    taken = _update_sweep(job).where(unchanged).values(sweep_until=now() + LEASE_SECONDS).returning(backfill)
    return first_of(BackfillRow, connection.execute(taken))


def release_sweep(connection: Connection, job: BackfillRow) -> None:
    """Release the lease of a sweep, so that any process may continue it."""
    connection.execute(_update_sweep(job).values(sweep_until=None))


@contextmanager
def keeping_lease(database: Database, job: BackfillRow) -> Iterator[None]:
    """Renew the caller's lease of a sweep until the context ends."""
    leases: Leases[BackfillRow] = Leases(partial(_extend, database), LEASE_SECONDS)
    leases.hold(job)
    try:
        yield
    finally:
        leases.close()


def continue_sweep(
    database: Database,
    job: BackfillRow,
    version_order: VersionOrder,
    uncertain: Callable[[], ItemScores],
    stop: threading.Event | None = None,
) -> BackfillState | None:
    """Continue a sweep, whose lease the caller holds, to its end.

    `version_order` is that of `service.registry.placement` while the backfill's target is current. `uncertain` returns
    the items' uncertainties, for item order `uncertainty`; items without one come last.

    Keys are read and chunks written some thousand at a time. Orders by age hold only these in memory; others hold all
    keys: 8 bytes per item, 24 while they are sorted.

    Returns:
        The state of the backfill: running, with new chunks, or done. None: it was paused or cancelled meanwhile,
        another process continues it, or `stop` was set.

    Raises:
        UnknownGallery: its gallery was deleted.
    """
    return _Sweep(database, job, version_order, uncertain, stop or threading.Event()).run()


@dataclass
class _Sweep:
    """One process's work on a sweep; `job` is the backfill's row as this process last wrote it."""

    database: Database
    job: BackfillRow
    version_order: VersionOrder
    uncertain: Callable[[], ItemScores]
    stop: threading.Event
    number: int = 0
    """The number of the next chunk."""

    def run(self) -> BackfillState | None:
        with self.database.read() as connection:
            self.number = next_number(connection, self.job.id)
        through = self._plan_waiting() and self._plan_failed()
        with self.database.write() as connection:
            if through:
                return _close(connection, self.job, self.version_order)
            release_sweep(connection, self.job)
        return None

    def _plan_waiting(self) -> bool:
        """Plan the items that were never planned or were skipped, in order, as many as share and limit allow."""
        size = self.job.chunk_size * max(1, min(CHUNKS, KEYS_PER_RANGE // self.job.chunk_size))
        by_age = self.job.item_order in BY_AGE
        budget = self._budget()
        for keys in regroup(take(self._in_order(), budget), size) if budget != 0 else ():
            at, started = int(keys[-1]) if by_age else self.job.sweep_at + len(keys), time.monotonic()
            with self.database.write() as connection:
                progress = {"sweep_at": at, "total": backfill.c.total + len(keys)}
                if self.stop.is_set() or not self._write(connection, keys, progress):
                    return False
            if len(keys) == size:
                # Writers to SQLite wait by sleeping: without an equally long pause they might never get the lock.
                self.stop.wait(min(time.monotonic() - started, PAUSE_SECONDS))
        return True

    def _plan_failed(self) -> bool:
        """Plan failed items that are to be retried; they stay recorded as failed."""
        last: int | None = 0
        while last is not None:
            with self.database.write() as connection:
                # Lock the row before its failures are counted.
                if self.stop.is_set() or not self._write(connection, np.empty(0, np.int64), {}):
                    return False
                keys, last = next_retries(connection, self.job, self.version_order, last)
                if keys:
                    self._write(connection, np.array(keys, np.int64), {})
        return True

    def _write(self, connection: Connection, keys: Keys, progress: dict[str, Any]) -> bool:
        """Append chunks of these keys; False: another process continued the sweep, or the backfill is not running."""
        take_seq(connection, self.job.gallery_id, 0)  # so that the gallery is not deleted between chunk and backfill
        values = {"revision": backfill.c.revision + min(len(keys), 1), **progress}
        row = first_of(BackfillRow, connection.execute(_update_sweep(self.job).values(values).returning(backfill)))
        if row is None:
            return False
        size = self.job.chunk_size
        chunks = [keys[start : start + size].tolist() for start in range(0, len(keys), size)]
        if chunks:
            rows = [{"number": self.number + n, "item_ids": ids} for n, ids in enumerate(chunks)]
            connection.execute(insert(backfill_chunk).values(backfill_id=self.job.id, state="todo"), rows)
        self.number += len(chunks)
        self.job = row
        return True

    def _in_order(self) -> Iterator[Keys]:
        job, eligible = self.job, self._eligible()
        if job.item_order in BY_AGE:
            newest_first = job.item_order == "newest"
            yield from keys_by_age(
                self.database, eligible, job.filter, newest_first=newest_first, after=job.sweep_at or None
            )
            return
        planned = _planned_keys(self.database, job) if job.sweep_at else np.empty(0, np.int64)
        found, numbers = [np.empty(0, np.int64)], [np.empty(0)]
        for block in keys_by_age(self.database, eligible, job.filter):
            keys = block[~np.isin(block, planned)]
            found.append(keys)
            if job.item_order in SCORE_QUERIES and len(keys):
                numbers.append(self._scores(eligible, keys))
            if self.stop.is_set():
                return
        keys, scores = np.concatenate(found), None
        if job.item_order == "uncertainty":
            scores = self.uncertain().of(keys, -math.inf)
        elif job.item_order in SCORE_QUERIES:
            scores = np.concatenate(numbers)
        # Only the scores of this order were read: they cost several times as much as the keys.
        waiting = PendingItems(keys, uncertainty=scores, matches=scores, transformed=scores, seed=job.id)
        ordered = keys[backfill_order(job.item_order, waiting)]
        yield from (ordered[start : start + KEYS_PER_RANGE] for start in range(0, len(ordered), KEYS_PER_RANGE))

    def _scores(self, eligible: ColumnElement[bool], keys: Keys) -> Any:
        within = item.c.id.between(int(keys[0]), int(keys[-1]))
        with self.database.read() as connection:
            return read_scores(
                connection, SCORE_QUERIES[self.job.item_order](and_(eligible, within), self.version_order)
            ).of(keys, 0.0)

    def _eligible(self) -> ColumnElement[bool]:
        """Which rows of `item` the sweep plans."""
        job = self.job
        is_failed = exists().where(backfill_failure.c.backfill_id == job.id, backfill_failure.c.item_id == item.c.id)
        waiting = waiting_items(job.gallery_id, Kind(job.kind), job.version_id, self.version_order, job.origin)
        # `seq + 0` keeps the database from using the index on `seq`, as the ranges go by keys.
        return and_(waiting, not_(is_failed), item.c.seq + 0 < job.sweep_seq)

    def _budget(self) -> int | None:
        """How many more items may be planned, None: all. The first sweep counts items to turn a share into a limit."""
        job = self.job
        if job.share is not None and job.total == 0:
            found = sum(map(len, keys_by_age(self.database, self._eligible(), job.filter)))
            self.job = job = replace(job, item_limit=capped_count(found, job.share, job.item_limit))
            with self.database.write() as connection:
                connection.execute(_update_sweep(job).values(item_limit=job.item_limit))
        return _remaining_budget(job)


def _update_sweep(job: BackfillRow) -> Update:
    """UPDATE of the backfill, if it is running and its sweep's progress is that of this row."""
    same = (backfill.c.sweep_seq == job.sweep_seq, backfill.c.sweep_at == job.sweep_at)
    return update(backfill).where(backfill.c.id == job.id, backfill.c.state == BackfillState.RUNNING, *same)


def _extend(database: Database, job: BackfillRow) -> None:
    statement = update(backfill).where(backfill.c.id == job.id, backfill.c.sweep_seq == job.sweep_seq)
    with database.write() as connection:
        connection.execute(statement.values(sweep_until=now() + LEASE_SECONDS))


def _remaining_budget(job: BackfillRow) -> int | None:
    # Skipped items do not count as planned.
    return None if job.item_limit is None else max(job.item_limit - (job.total - job.skipped), 0)


def next_number(connection: Connection, backfill_id: int) -> int:
    """The number of the next chunk of a backfill, after all others."""
    numbered = select(func.coalesce(func.max(backfill_chunk.c.number), -1) + 1)
    return int(connection.execute(numbered.where(backfill_chunk.c.backfill_id == backfill_id)).scalar_one())


def _planned_keys(database: Database, job: BackfillRow) -> Keys:
    """The keys that the sweep has planned: those in chunks `todo`, since none is claimed during a sweep."""
    parts, last = [np.empty(0, np.int64)], -1
    chunk = select(backfill_chunk.c.number, backfill_chunk.c.item_ids).where(backfill_chunk.c.backfill_id == job.id)
    ahead = chunk.where(backfill_chunk.c.state == "todo").order_by(backfill_chunk.c.number).limit(CHUNKS)
    while True:
        with database.read() as connection:
            rows = connection.execute(ahead.where(backfill_chunk.c.number > last)).all()
        if not rows:
            return np.concatenate(parts)
        parts += [np.array(ids, np.int64) for _, ids in rows]
        last = rows[-1].number


def _close(connection: Connection, job: BackfillRow, version_order: VersionOrder) -> BackfillState | None:
    """End a complete sweep, and its backfill if nothing is left; the gallery's lock keeps writes out meanwhile."""
    seq = take_seq(connection, job.gallery_id, 0)
    planned = {
        "sweep_seq": None,
        "sweep_until": None,
        "resumed": func.coalesce(backfill.c.resumed, now()),
        "revision": backfill.c.revision + 1,
    }
    row = first_of(BackfillRow, connection.execute(_update_sweep(job).values(planned).returning(backfill)))
    if row is None:
        return None
    if job.id not in drained(connection):
        return BackfillState.RUNNING
    assert job.sweep_seq is not None
    if (
        seq > job.sweep_seq
        and _remaining_budget(row) != 0
        and _written_since(connection, row, version_order, job.sweep_seq)
    ):
        connection.execute(
            update(backfill).where(backfill.c.id == job.id).values({**new_sweep_columns(seq), "sweep_until": None})
        )
        return None
    return (
        BackfillState.DONE if change_state(connection, job.id, (BackfillState.RUNNING,), BackfillState.DONE) else None
    )


def _written_since(connection: Connection, job: BackfillRow, version_order: VersionOrder, seq: int) -> bool:
    """Whether an item that was written since the sweep began has to be moved; assumed if very many were written."""
    since = select(item.c.id).where(item.c.gallery_id == job.gallery_id, item.c.seq >= seq).limit(KEYS_PER_RANGE)
    keys = select_keys(connection, since)
    if len(keys) == KEYS_PER_RANGE:
        return True
    waiting = items_to_move(connection, job, version_order, set(keys.tolist()))
    conditions = (backfill_failure.c.backfill_id == job.id, backfill_failure.c.item_id == item.c.id)
    given_up = exists().where(*conditions, backfill_failure.c.seq == item.c.seq)
    left = select(item.c.id).where(item.c.id.in_(key_table(connection, waiting).keys), not_(given_up)).limit(1)
    return connection.execute(left).first() is not None
