"""Which items a backfill has to move, cut into chunks; planned again at its end, until none is left.

An item that failed is planned again when its pause is over, or when it was written anew; other items never wait for it.
Every function runs in its caller's transaction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from decimal import Decimal
from enum import StrEnum
from typing import Any

import numpy as np
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    case,
    delete,
    exists,
    false,
    func,
    insert,
    or_,
    select,
    true,
    update,
)

from index.evaluation.ordering import Waiting, backfill_order
from index.version import ENCODER, TEXT_ENCODER, EdgeKind
from service.backfills.filtering import passing
from service.backfills.ranges import NOTHING_TOLD, RANGE, Keys, Scored, first, keys_by_age, told
from service.store.blob_keys import TEXT
from service.store.embeddings import first_held, says_itself
from service.store.repository import take_seq
from service.store.rows import BackfillRow, one_of
from service.store.sql_arrays import listed
from service.store.tables import (
    backfill,
    backfill_chunk,
    backfill_failure,
    edge,
    embedding,
    item,
    item_traffic,
    version,
)

BY_AGE = ("oldest", "newest")
"""Orders that the keys have already."""
MAX_PAUSE_SECONDS = 300.0
"""The longest pause before an item that failed is tried again; one that lies further ahead: the clock was set back."""

Order = Sequence[int]
"""Version ids, the one that serves an item best first."""


class Kind(StrEnum):
    """From what workers compute the new embeddings; what nobody computes is in `service.backfills.supplied`."""

    REENCODE = "reencode"
    TRANSFORM = "transform"


class BackfillState(StrEnum):
    """The life of a backfill."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"


ACTIVE = (BackfillState.RUNNING, BackfillState.PAUSED)


def embeddable(version_id: int) -> ColumnElement[bool]:
    """Whether a row of `item` has an image or a text that the version's encoder for such takes."""
    text = item.c.blob.like(f"%{TEXT}")
    texts, images = _says(version_id, ("files", TEXT_ENCODER), ("api", "url")), _says(version_id, ("files", ENCODER))
    return and_(item.c.blob.is_not(None), or_(and_(text, texts), and_(~text, images)))


def _says(version_id: int, *fields: tuple[str, str]) -> ColumnElement[bool]:
    """Whether the version's card has a text at one of these places."""
    there = (version.c.card[outer][inner].as_string().is_not(None) for outer, inner in fields)
    return exists().where(version.c.id == version_id, or_(*there))


def _reencodes(version_id: int) -> ColumnElement[bool]:
    return and_(embeddable(version_id), ~says_itself(version_id))


def _transforms(version_id: int) -> ColumnElement[bool]:
    held, own = embedding.alias("held"), embedding.alias("own")
    carried = exists().where(held.c.item_id == item.c.id, held.c.version_id.in_(forward_from(version_id)))
    return and_(carried, ~exists().where(own.c.item_id == item.c.id, own.c.version_id == version_id))


QUALIFIES: dict[Kind, Callable[[int], ColumnElement[bool]]] = {
    Kind.REENCODE: _reencodes,
    Kind.TRANSFORM: _transforms,
}
"""Which live items a backfill to this version could move."""


def forward_from(version_id: int) -> Select[int]:
    """SELECT of the ids of the versions from which an item edge leads to this one."""
    return select(edge.c.old_id).where(edge.c.new_id == version_id, edge.c.kind == EdgeKind.FORWARD.value)


def read_version(kind: Kind, version_id: int, order: Order) -> ColumnElement[Any]:
    """The version of the embedding of an item that such a backfill starts from: the one that serves it.

    For `transform` the first in the same order of those with an item edge to the target: so every worker makes the same
    of the item.
    """
    return first_held(order, forward_from(version_id) if kind is Kind.TRANSFORM else None)


def stored_for(kind: Kind, version_id: int, order: Order) -> ColumnElement[bool]:
    """ON clause of `item` and the one embedding of it that such a backfill starts from."""
    return and_(embedding.c.item_id == item.c.id, embedding.c.version_id == read_version(kind, version_id, order))


def waiting_items(
    gallery_id: int, kind: Kind, version_id: int, order: Order, origin: str | None = None
) -> ColumnElement[bool]:
    """Which rows of `item` such a backfill has to move; `origin` is that of the embedding served, None: any."""
    scope = [item.c.gallery_id == gallery_id, item.c.deleted == false(), QUALIFIES[kind](version_id)]
    return and_(*scope, *([served_origin(order, origin)] if origin else []))


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


def plan(connection: Connection, job: BackfillRow, order: Order, uncertain: Scored = NOTHING_TOLD) -> int:
    """Cut what the backfill has to move now into chunks; `job` is its row as it is.

    `order` is that of `service.registry.placement.Places` while its target is current. `uncertain` says how unsure the
    items are, for the order by it; an item that is missing there comes last.

    Keys are read and chunks written some thousand at a time. By age nothing else is held; the other orders need all
    keys at once, in arrays: eight bytes an item, three times while they are put in order.

    Returns:
        How many items were planned: new ones, and those that are to be tried again.
    """
    # First: what is to be tried again is still known as such.
    fresh = _write_chunks(connection, job, _fresh(connection, job, order, uncertain))
    due = np.array(_due(connection, job, order) + _written_anew(connection, job, order), np.int64)
    again = _write_chunks(connection, job, iter([due]))
    if fresh or again:
        grown = {"total": backfill.c.total + fresh, "revision": backfill.c.revision + 1}
        connection.execute(update(backfill).where(backfill.c.id == job.id).values(grown))
    return fresh + again


def _fresh(connection: Connection, job: BackfillRow, order: Order, uncertain: Scored) -> Iterator[Keys]:
    """Items that were never planned or were skipped, in order, as many as the scope allows."""
    known = exists().where(backfill_failure.c.backfill_id == job.id, backfill_failure.c.item_id == item.c.id)
    among = and_(waiting_items(job.gallery_id, Kind(job.kind), job.version_id, order, job.origin), ~known)
    # Keys grow in the order items were first stored.
    if job.item_order in BY_AGE:
        newest_first = job.item_order == "newest"
        budget = _budget(connection, job, lambda: sum(map(len, keys_by_age(connection, among, job.filter))))
        return first(keys_by_age(connection, among, job.filter, newest_first=newest_first), budget)
    keys = np.concatenate([*keys_by_age(connection, among, job.filter), np.empty(0, np.int64)])
    scores = None
    if job.item_order == "uncertainty":
        scores = uncertain.of(keys, -math.inf)
    elif job.item_order in GOES_BY:
        scores = told(connection, GOES_BY[job.item_order](among, order)).of(keys, 0.0)
    # An order looks at what it goes by, and others are not read: that costs several times as much as the keys.
    waiting = Waiting(keys, uncertainty=scores, matches=scores, transformed=scores, seed=job.id)
    ordered = keys[backfill_order(job.item_order, waiting)]
    budget = _budget(connection, job, lambda: len(ordered))
    return first((ordered[start : start + RANGE] for start in range(0, len(ordered), RANGE)), budget)


def _write_chunks(connection: Connection, job: BackfillRow, blocks: Iterator[Keys]) -> int:
    """Cut keys into chunks behind those there are; returns how many keys there were."""
    number, count, rest = _next_number(connection, job.id), 0, np.empty(0, np.int64)

    def write(keys: Keys) -> None:
        nonlocal number
        cut = [keys[start : start + job.chunk_size].tolist() for start in range(0, len(keys), job.chunk_size)]
        if cut:
            rows = [{"number": number + n, "item_ids": ids} for n, ids in enumerate(cut)]
            connection.execute(insert(backfill_chunk).values(backfill_id=job.id, state="todo"), rows)
            number += len(cut)

    for block in blocks:
        count += len(block)
        rest = np.concatenate([rest, block])
        whole = len(rest) - len(rest) % job.chunk_size
        write(rest[:whole])
        rest = rest[whole:]
    write(rest)
    return count


def _budget(connection: Connection, job: BackfillRow, found: Callable[[], int]) -> int | None:
    """How many more items may be planned, None: all. The share counts what is there at first, and is a limit then."""
    limit = job.item_limit
    if job.share is not None and job.total == 0:
        limit = most(found(), job.share, limit)
        connection.execute(update(backfill).where(backfill.c.id == job.id).values(item_limit=limit))
    if limit is None:
        return None
    # Nothing else is under way when this is asked but items that wait to be tried again.
    waiting = select(func.count()).where(backfill_failure.c.backfill_id == job.id, backfill_failure.c.final == false())
    spent = job.done + job.failed + connection.execute(waiting).scalar_one()
    return max(int(limit) - int(spent), 0)


def most(found: int, share: float | None, limit: int | None) -> int:
    """How many of the items found a backfill may move: at most that share of them, but one at least, and the limit."""
    if share is not None:
        # In decimals, as it was written: 0.07 of 400 is 28, not the 28.000000000000004 of binary fractions.
        found = min(found, max(int(Decimal(repr(share)) * found), 1))
    return found if limit is None else min(found, limit)


def _due(connection: Connection, job: BackfillRow, order: Order) -> list[int]:
    """Items whose pause is over; one that needs no move any more is counted as skipped."""
    mine = (backfill_failure.c.backfill_id == job.id, _pause_is_over())
    ids = set(connection.execute(select(backfill_failure.c.item_id).where(*mine)).scalars())
    still = _still_waiting(connection, job, order, ids)
    if gone := ids - set(still):
        _forget(connection, job.id, gone)
        skipped = {"skipped": backfill.c.skipped + len(gone), "revision": backfill.c.revision + 1}
        connection.execute(update(backfill).where(backfill.c.id == job.id).values(skipped))
    planned = update(backfill_failure).where(backfill_failure.c.backfill_id == job.id, _pause_is_over())
    connection.execute(planned.values(next_try=None))
    return still


def _written_anew(connection: Connection, job: BackfillRow, order: Order) -> list[int]:
    """Items that were given up, and written since: they count as waiting again."""
    changed = (
        select(item.c.id)
        .join(backfill_failure, backfill_failure.c.item_id == item.c.id)
        .where(
            backfill_failure.c.backfill_id == job.id,
            backfill_failure.c.final == true(),
            backfill_failure.c.seq != item.c.seq,
        )
    )
    again = _still_waiting(connection, job, order, set(connection.execute(changed).scalars()))
    if again:
        _forget(connection, job.id, again)
        fewer = update(backfill).where(backfill.c.id == job.id).values(failed=backfill.c.failed - len(again))
        connection.execute(fewer)
    return again


def _still_waiting(connection: Connection, job: BackfillRow, order: Order, ids: set[int]) -> list[int]:
    if not ids:
        return []
    still = waiting_items(job.gallery_id, Kind(job.kind), job.version_id, order, job.origin)
    among = and_(item.c.id.in_(listed(connection, sorted(ids)).keys), still)
    if job.filter is not None:
        return sorted(passing(connection, among, job.filter))
    return sorted(connection.execute(select(item.c.id).where(among)).scalars())


def _forget(connection: Connection, backfill_id: int, ids: Collection[int]) -> None:
    keys = listed(connection, sorted(ids)).keys
    mine = (backfill_failure.c.backfill_id == backfill_id, backfill_failure.c.item_id.in_(keys))
    connection.execute(delete(backfill_failure).where(*mine))


def _pause_is_over() -> ColumnElement[bool]:
    now = time.time()
    return or_(backfill_failure.c.next_try <= now, backfill_failure.c.next_try > now + MAX_PAUSE_SECONDS)


def served_origin(order: Order, origin: str) -> ColumnElement[bool]:
    """Whether a row of `item` is served by an embedding of this origin."""
    served = embedding.alias("served")
    return exists().where(
        served.c.item_id == item.c.id, served.c.origin == origin, served.c.version_id == first_held(order)
    )


def _next_number(connection: Connection, backfill_id: int) -> int:
    numbered = select(func.coalesce(func.max(backfill_chunk.c.number), -1) + 1)
    return int(connection.execute(numbered.where(backfill_chunk.c.backfill_id == backfill_id)).scalar_one())


def drained(connection: Connection) -> list[int]:
    """The running backfills that have no chunk left to claim or to wait for, nor an item whose pause lasts."""
    left = exists().where(backfill_chunk.c.backfill_id == backfill.c.id, backfill_chunk.c.state.in_(("todo", "leased")))
    resting = exists().where(
        backfill_failure.c.backfill_id == backfill.c.id, backfill_failure.c.next_try.is_not(None), ~_pause_is_over()
    )
    mine = (backfill.c.state == BackfillState.RUNNING, backfill.c.kind.in_(tuple(Kind)))
    statement = select(backfill.c.id).where(*mine, ~left, ~resting)
    return list(connection.execute(statement.order_by(backfill.c.id)).scalars())


def finish_or_extend(
    connection: Connection,
    backfill_id: int,
    order_of: Callable[[int], Order],
    uncertain: Scored = NOTHING_TOLD,
) -> BackfillState | None:
    """End a drained backfill, or plan the items that came or changed while it ran, or are to be tried again.

    `order_of` gives the order of places while a version is current.

    Returns:
        Its state now; None when there is nothing to do: another worker was faster, or it was deleted.
    """
    gallery_id = connection.execute(select(backfill.c.gallery_id).where(backfill.c.id == backfill_id)).scalar()
    if gallery_id is None:
        return None
    take_seq(connection, gallery_id, 0)
    if backfill_id not in drained(connection):
        return None
    job = one_of(BackfillRow, connection.execute(select(backfill).where(backfill.c.id == backfill_id)))
    if plan(connection, job, order_of(job.version_id), uncertain):
        return BackfillState.RUNNING
    return BackfillState.DONE if turn(connection, backfill_id, (BackfillState.RUNNING,), BackfillState.DONE) else None


def turn(connection: Connection, backfill_id: int, before: Sequence[BackfillState], after: BackfillState) -> bool:
    """Bring a backfill from one of the states `before` to another, keeping account of the time it ran."""
    now = time.time()
    ran = backfill.c.active_seconds + func.coalesce(now - backfill.c.resumed, 0.0)
    values = {
        "state": after,
        "revision": backfill.c.revision + 1,
        # A clock that was set back must not take away what was counted.
        "active_seconds": case((ran > backfill.c.active_seconds, ran), else_=backfill.c.active_seconds),
        "resumed": now if after is BackfillState.RUNNING else None,
        "finished": None if after in ACTIVE else now,
    }
    turned = update(backfill).where(backfill.c.id == backfill_id, backfill.c.state.in_(before))
    return connection.execute(turned.values(values)).rowcount == 1


def cancel_backfills(connection: Connection, gallery_id: int, current_id: int) -> int:
    """End the gallery's backfills that lead to another version than the one that becomes current; returns how many."""
    mine = (backfill.c.gallery_id == gallery_id, backfill.c.version_id != current_id, backfill.c.state.in_(ACTIVE))
    active = connection.execute(select(backfill.c.id).where(*mine)).scalars().all()
    return sum(turn(connection, backfill_id, ACTIVE, BackfillState.CANCELLED) for backfill_id in active)
