"""Read backfills and their failures for the routes. Every function runs in its caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, func, select

from index.errors import RegraftError
from service.backfills.states import running_seconds
from service.store.galleries.embeddings import first_held
from service.store.rows import BackfillRow, all_of, first_of, newest_of
from service.store.tables import backfill, backfill_failure, item


class UnknownBackfill(RegraftError):
    """No backfill has this number."""

    status = 404
    code = "unknown_backfill"


@dataclass(frozen=True)
class RetryingBackfill(BackfillRow):
    """A backfill, how many of its items wait for a retry, and the seconds it has run since its last pause."""

    retrying: int
    running_seconds: float


class FailureRow(NamedTuple):
    """An item that a backfill could not move, and the version that serves it.

    `next_try` None: it was given up, or is being tried again.
    """

    item_id: int
    external_id: str
    version_id: int | None
    code: str
    reason: str
    attempts: int
    next_try: float | None
    at: float


def backfill_row(connection: Connection, number: int) -> RetryingBackfill:
    """The backfill of a number. Raises UnknownBackfill."""
    row = first_of(RetryingBackfill, connection.execute(_select_backfills().where(backfill.c.id == number)))
    if row is None:
        raise UnknownBackfill(f"backfill {number} does not exist")
    return row


def backfill_rows(connection: Connection, gallery_id: int, limit: int | None) -> list[RetryingBackfill]:
    """Every backfill of a gallery, or the newest `limit` of them, oldest first."""
    statement = _select_backfills().where(backfill.c.gallery_id == gallery_id)
    return newest_of(RetryingBackfill, connection, statement, backfill.c.id, limit)


def failures_after(
    connection: Connection, number: int, version_order: Sequence[int], after: int, limit: int
) -> list[FailureRow]:
    """Up to `limit` items that a backfill could not move, whose key is above `after`, by key.

    `version_order`: version ids for `first_held` (service.store.galleries.embeddings), which finds the version that
    serves an item.
    """
    item_columns = (item.c.id, item.c.external_id, first_held(version_order))
    failure_columns = tuple(backfill_failure.c[name] for name in ("code", "reason", "attempts", "next_try", "at"))
    statement = select(*item_columns, *failure_columns).join(backfill_failure, item.c.id == backfill_failure.c.item_id)
    statement = statement.where(backfill_failure.c.backfill_id == number, backfill_failure.c.item_id > after)
    return all_of(FailureRow, connection.execute(statement.order_by(backfill_failure.c.item_id).limit(limit)))


def _select_backfills() -> Select[Any]:
    waiting = select(func.count()).where(
        backfill_failure.c.backfill_id == backfill.c.id, backfill_failure.c.final.is_(False)
    )
    return select(backfill, waiting.scalar_subquery().label("retrying"), running_seconds().label("running_seconds"))
