"""The list of items that a backfill could not move."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from service.backfills.records import FailureRow, backfill_row, failures_after
from service.http.cursors import decode_cursor, encode_cursor
from service.http.requests import CheckedRoute, Service
from service.registry.registry import Registry
from service.schemas import Number

router = APIRouter(route_class=CheckedRoute, tags=["backfills"])


class Failure(BaseModel):
    """An item that could not be moved, and why; it stays reachable in `version`. `next_try`: it will be tried again.

    `code`: `image_missing`, `image_invalid`, `image_unreadable` or `refused` (by the encoder or the edge).
    """

    item: str
    code: str
    reason: str
    attempts: int
    next_try: float | None
    version: str | None
    at: float


class Failures(BaseModel):
    """A page of a backfill's failures, those that wait to be tried again too, and how many items were given up.

    `next` is the cursor of the page behind it, null at the end.
    """

    failures: list[Failure]
    failed: int
    next: str | None


@router.get("/backfills/{number}/failures")
def failures(
    number: Number,
    service: Service,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    cursor: str = "",
) -> Failures:
    """Items that could not be moved, with the reason."""
    after = decode_cursor(cursor)
    with service.database.read() as connection:
        row = backfill_row(connection, number)
        rows = failures_after(connection, number, after, limit + 1)
    page = rows[:limit]
    following = encode_cursor(page[-1].item_id) if len(rows) > limit else None
    return Failures(failures=[_failure(service.registry, f) for f in page], failed=row.failed, next=following)


def _failure(registry: Registry, row: FailureRow) -> Failure:
    return Failure(
        item=row.external_id,
        code=row.code,
        reason=row.reason,
        attempts=row.attempts,
        next_try=row.next_try,
        version=None if row.active_id is None else registry.by_id(row.active_id).name,
        at=row.at,
    )
