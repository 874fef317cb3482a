"""Sweeps: how a backfill is cut into chunks, in short transactions, so that writes to its gallery never wait for long.

A sweep plans the items as they were at one number of the gallery's feed, each at most once; those written since wait
for the next one. The first begins when a backfill is made, another whenever all its chunks are done; the backfill ends
with one that finds nothing, unless something was written since. Chunks are claimed when the sweep is through, so
nothing moves meanwhile.

How far a sweep is stands in the backfill's row, and whoever goes on with it moves that on together with the chunks it
writes. So it can be killed anywhere, paused or cancelled, and two that go on with the same one plan no item twice: the
slower finds the row changed and stops.
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
from service.backfills.attempts import still_waiting, to_try_again
from service.backfills.planner import BackfillState, Kind, Order, drained, most, served_origin, turn, waiting_items
from service.backfills.scores import Scored, told
from service.store.database import Database
from service.store.job_leases import is_over
from service.store.leases import Leases
from service.store.ranges import RANGE, Keys, first, keys_by_age, pieces
from service.store.repository import take_seq
from service.store.rows import BackfillRow, all_of, first_of, one_of
from service.store.sql_arrays import key_table, select_keys
from service.store.sql_time import now
from service.store.tables import backfill, backfill_chunk, backfill_failure, item, item_traffic

BY_AGE = ("oldest", "newest")
"""Orders that the keys have already."""
CHUNKS = 512
"""Chunks that are written in one transaction, or fewer: `RANGE` items at most."""
PAUSE_SECONDS = 0.25
"""The longest pause between two of them."""
LEASE_SECONDS = 30.0
"""How long a sweep is left to a process that gives no sign any more."""


def _matches(among: ColumnElement[bool], _order: Order) -> Select[Any]:
    counted = select(item.c.id, item_traffic.c.matches).join(item_traffic, item_traffic.c.item_id == item.c.id)
    return counted.where(among)


def _transformed(among: ColumnElement[bool], order: Order) -> Select[Any]:
    return select(item.c.id, true()).where(among, served_origin(order, "transformed"))


GOES_BY: dict[str, Callable[[ColumnElement[bool], Order], Select[Any]]] = {
    "traffic": _matches,
    "transformed": _transformed,
}
"""SELECT of the keys and scores of the items that are not at the end of an order."""


def fresh(seq: int) -> dict[str, Any]:
    """The columns of a backfill at the beginning of a sweep; `seq`: the next number of the gallery's feed.

    It is left to who begins it for the time of a lease.
    """
    return {"sweep_seq": seq, "sweep_at": 0, "sweep_until": now() + LEASE_SECONDS}


def begin_again(connection: Connection, backfill_id: int) -> BackfillRow | None:
    """Begin another sweep of a backfill whose chunks are done; None: another process was faster, or it was deleted."""
    gallery_id = connection.execute(select(backfill.c.gallery_id).where(backfill.c.id == backfill_id)).scalar()
    if gallery_id is None:
        return None
    seq = take_seq(connection, gallery_id, 0)
    if backfill_id not in drained(connection):
        return None
    values = {**fresh(seq), "revision": backfill.c.revision + 1}
    begun = update(backfill).where(backfill.c.id == backfill_id).values(values).returning(backfill)
    return one_of(BackfillRow, connection.execute(begun))


def left_alone(connection: Connection) -> list[BackfillRow]:
    """The running backfills with a sweep that nobody goes on with."""
    until = backfill.c.sweep_until
    free = or_(until.is_(None), is_over(until, LEASE_SECONDS))
    conditions = (backfill.c.state == BackfillState.RUNNING, backfill.c.sweep_seq.is_not(None), free)
    return all_of(BackfillRow, connection.execute(select(backfill).where(*conditions).order_by(backfill.c.id)))


def take(connection: Connection, job: BackfillRow) -> BackfillRow | None:
    """Be who goes on with the sweep of this row for the time of a lease; None: another process was faster."""
    until = backfill.c.sweep_until
    unchanged = until.is_(None) if job.sweep_until is None else until == job.sweep_until
    taken = _at(job).where(unchanged).values(sweep_until=now() + LEASE_SECONDS).returning(backfill)
    return first_of(BackfillRow, connection.execute(taken))


def let_go(connection: Connection, job: BackfillRow) -> None:
    """Leave a sweep to whoever looks for one next."""
    connection.execute(_at(job).values(sweep_until=None))


@contextmanager
def keeping_lease(database: Database, job: BackfillRow) -> Iterator[None]:
    """Around the work on a sweep whose lease is the caller's."""
    leases: Leases[BackfillRow] = Leases(partial(_extend, database), LEASE_SECONDS)
    leases.hold(job)
    try:
        yield
    finally:
        leases.close()


def go_on(
    database: Database,
    job: BackfillRow,
    order: Order,
    uncertain: Callable[[], Scored],
    stop: threading.Event | None = None,
) -> BackfillState | None:
    """Bring a sweep, whose lease is the caller's, to its end.

    `order` is that of `service.registry.placement.Places` while its target is current. `uncertain` says how unsure the
    items are, for the order by it; an item that is missing there comes last.

    Keys are read and chunks written some thousand at a time. By age nothing else is held; the other orders need all
    keys at once, in arrays: eight bytes an item, three times while they are put in order.

    Returns:
        The state of the backfill: running, with new chunks, or done. None: it was paused or cancelled meanwhile,
        another process goes on with it, or `stop` was set.

    Raises:
        UnknownGallery: its gallery was deleted.
    """
    return _Sweep(database, job, order, uncertain, stop or threading.Event()).run()


@dataclass
class _Sweep:
    """One process's part of a sweep; `job` is the row as this process has left it."""

    database: Database
    job: BackfillRow
    order: Order
    uncertain: Callable[[], Scored]
    stop: threading.Event
    number: int = 0
    """Of the next chunk."""

    def run(self) -> BackfillState | None:
        with self.database.read() as connection:
            self.number = next_number(connection, self.job.id)
        through = self._plan_waiting() and self._plan_failed()
        with self.database.write() as connection:
            if through:
                return _close(connection, self.job, self.order)
            let_go(connection, self.job)
        return None

    def _plan_waiting(self) -> bool:
        """Plan the items that were never planned or were skipped, in order, as many as the scope allows."""
        size = self.job.chunk_size * max(1, min(CHUNKS, RANGE // self.job.chunk_size))
        by_age = self.job.item_order in BY_AGE
        budget = self._budget()
        for keys in pieces(first(self._in_order(), budget), size) if budget != 0 else ():
            at, began = int(keys[-1]) if by_age else self.job.sweep_at + len(keys), time.monotonic()
            with self.database.write() as connection:
                moved_on = {"sweep_at": at, "total": backfill.c.total + len(keys)}
                if self.stop.is_set() or not self._write(connection, keys, moved_on):
                    return False
            if len(keys) == size:
                # SQLite makes others wait by sleeping: without a pause as long they might not get their turn.
                self.stop.wait(min(time.monotonic() - began, PAUSE_SECONDS))
        return True

    def _plan_failed(self) -> bool:
        """Plan what failed and is to be tried again; what is planned so is known as failed."""
        last: int | None = 0
        while last is not None:
            with self.database.write() as connection:
                # The row is locked before it is counted what becomes of its failures.
                if self.stop.is_set() or not self._write(connection, np.empty(0, np.int64), {}):
                    return False
                keys, last = to_try_again(connection, self.job, self.order, last)
                if keys:
                    self._write(connection, np.array(keys, np.int64), {})
        return True

    def _write(self, connection: Connection, keys: Keys, moved_on: dict[str, Any]) -> bool:
        """Write chunks of these keys behind those there are; False: the sweep is no longer this process's."""
        take_seq(connection, self.job.gallery_id, 0)  # so that nobody deletes the gallery between chunk and backfill
        values = {"revision": backfill.c.revision + min(len(keys), 1), **moved_on}
        row = first_of(BackfillRow, connection.execute(_at(self.job).values(values).returning(backfill)))
        if row is None:
            return False
        size = self.job.chunk_size
        cut = [keys[start : start + size].tolist() for start in range(0, len(keys), size)]
        if cut:
            rows = [{"number": self.number + n, "item_ids": ids} for n, ids in enumerate(cut)]
            connection.execute(insert(backfill_chunk).values(backfill_id=self.job.id, state="todo"), rows)
        self.number += len(cut)
        self.job = row
        return True

    def _in_order(self) -> Iterator[Keys]:
        job, among = self.job, self._among()
        if job.item_order in BY_AGE:
            newest_first = job.item_order == "newest"
            yield from keys_by_age(
                self.database, among, job.filter, newest_first=newest_first, behind=job.sweep_at or None
            )
            return
        planned = _standing(self.database, job) if job.sweep_at else np.empty(0, np.int64)
        found, numbers = [np.empty(0, np.int64)], [np.empty(0)]
        for block in keys_by_age(self.database, among, job.filter):
            keys = block[~np.isin(block, planned)]
            found.append(keys)
            if job.item_order in GOES_BY and len(keys):
                numbers.append(self._scores(among, keys))
            if self.stop.is_set():
                return
        keys, scores = np.concatenate(found), None
        if job.item_order == "uncertainty":
            scores = self.uncertain().of(keys, -math.inf)
        elif job.item_order in GOES_BY:
            scores = np.concatenate(numbers)
        # An order looks at what it goes by, and others are not read: that costs several times as much as the keys.
        waiting = PendingItems(keys, uncertainty=scores, matches=scores, transformed=scores, seed=job.id)
        ordered = keys[backfill_order(job.item_order, waiting)]
        yield from (ordered[start : start + RANGE] for start in range(0, len(ordered), RANGE))

    def _scores(self, among: ColumnElement[bool], keys: Keys) -> Any:
        within = item.c.id.between(int(keys[0]), int(keys[-1]))
        with self.database.read() as connection:
            return told(connection, GOES_BY[self.job.item_order](and_(among, within), self.order)).of(keys, 0.0)

    def _among(self) -> ColumnElement[bool]:
        """Which rows of `item` the sweep plans."""
        job = self.job
        known = exists().where(backfill_failure.c.backfill_id == job.id, backfill_failure.c.item_id == item.c.id)
        waiting = waiting_items(job.gallery_id, Kind(job.kind), job.version_id, self.order, job.origin)
        # Computed, so that no database reads by an index of it: the ranges go by keys.
        return and_(waiting, not_(known), item.c.seq + 0 < job.sweep_seq)

    def _budget(self) -> int | None:
        """How many more items may be planned, None: all. The share counts what is there at first, then is a limit."""
        job = self.job
        if job.share is not None and job.total == 0:
            found = sum(map(len, keys_by_age(self.database, self._among(), job.filter)))
            self.job = job = replace(job, item_limit=most(found, job.share, job.item_limit))
            with self.database.write() as connection:
                connection.execute(_at(job).values(item_limit=job.item_limit))
        return _room(job)


def _at(job: BackfillRow) -> Update:
    """UPDATE of a backfill whose sweep runs and is as far as in this row."""
    same = (backfill.c.sweep_seq == job.sweep_seq, backfill.c.sweep_at == job.sweep_at)
    return update(backfill).where(backfill.c.id == job.id, backfill.c.state == BackfillState.RUNNING, *same)


def _extend(database: Database, job: BackfillRow) -> None:
    statement = update(backfill).where(backfill.c.id == job.id, backfill.c.sweep_seq == job.sweep_seq)
    with database.write() as connection:
        connection.execute(statement.values(sweep_until=now() + LEASE_SECONDS))


def _room(job: BackfillRow) -> int | None:
    # Of all that was planned, what was skipped does not count.
    return None if job.item_limit is None else max(job.item_limit - (job.total - job.skipped), 0)


def next_number(connection: Connection, backfill_id: int) -> int:
    """Of a chunk that is to come behind all others of a backfill."""
    numbered = select(func.coalesce(func.max(backfill_chunk.c.number), -1) + 1)
    return int(connection.execute(numbered.where(backfill_chunk.c.backfill_id == backfill_id)).scalar_one())


def _standing(database: Database, job: BackfillRow) -> Keys:
    """What stands in chunks that nobody has done: all the sweep has planned so far, as nothing moves meanwhile."""
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


def _close(connection: Connection, job: BackfillRow, order: Order) -> BackfillState | None:
    """End a sweep that is through; with the gallery's lock, so that nothing is written while its backfill ends."""
    seq = take_seq(connection, job.gallery_id, 0)
    planned = {
        "sweep_seq": None,
        "sweep_until": None,
        "resumed": func.coalesce(backfill.c.resumed, now()),
        "revision": backfill.c.revision + 1,
    }
    row = first_of(BackfillRow, connection.execute(_at(job).values(planned).returning(backfill)))
    if row is None:
        return None
    if job.id not in drained(connection):
        return BackfillState.RUNNING
    assert job.sweep_seq is not None
    if seq > job.sweep_seq and _room(row) != 0 and _written_since(connection, row, order, job.sweep_seq):
        connection.execute(update(backfill).where(backfill.c.id == job.id).values({**fresh(seq), "sweep_until": None}))
        return None
    return BackfillState.DONE if turn(connection, job.id, (BackfillState.RUNNING,), BackfillState.DONE) else None


def _written_since(connection: Connection, job: BackfillRow, order: Order, seq: int) -> bool:
    """Whether some item waits that was written since the sweep began; where very many were, they are not looked at."""
    since = select(item.c.id).where(item.c.gallery_id == job.gallery_id, item.c.seq >= seq).limit(RANGE)
    keys = select_keys(connection, since)
    if len(keys) == RANGE:
        return True
    waiting = still_waiting(connection, job, order, set(keys.tolist()))
    conditions = (backfill_failure.c.backfill_id == job.id, backfill_failure.c.item_id == item.c.id)
    given_up = exists().where(*conditions, backfill_failure.c.seq == item.c.seq)
    left = select(item.c.id).where(item.c.id.in_(key_table(connection, waiting).keys), not_(given_up)).limit(1)
    return connection.execute(left).first() is not None
