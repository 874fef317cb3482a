"""The list of items that a backfill could not move."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from regraft.models import FailurePage, ItemFailure
from service.backfills.records import FailureRow, backfill_row, failures_after
from service.http.backfills.access import KEY_OPENS_BACKFILL
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.cursors import decode_cursor, encode_cursor
from service.http.requests.dependencies import Service
from service.registry.placement import placement_in
from service.registry.registry import Registry
from service.schemas import Number
from service.store.galleries.gallery import gallery_row

router = APIRouter(route_class=CheckedRoute, tags=["backfills"])


@router.get("/backfills/{number}/failures", dependencies=[KEY_OPENS_BACKFILL])
def failures(
    number: Number,
    service: Service,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    cursor: str = "",
) -> FailurePage:
    """List the items that failed, with reasons."""
    after = decode_cursor(number, cursor)
    with service.database.read() as connection:
        row = backfill_row(connection, number)
        gallery = gallery_row(connection, row.gallery_id)
        order = placement_in(service.registry, gallery).version_order if gallery else ()
        rows = failures_after(connection, number, order, after, limit + 1)
    page = rows[:limit]
    following = encode_cursor(number, page[-1].item_id) if len(rows) > limit else None
    return FailurePage(failures=[_failure(service.registry, f) for f in page], failed=row.failed, next=following)


def _failure(registry: Registry, row: FailureRow) -> ItemFailure:
    return ItemFailure(
        item=row.external_id,
        code=row.code,
        reason=row.reason,
        attempts=row.attempts,
        next_try=row.next_try,
        version=None if row.version_id is None else registry.by_id(row.version_id).name,
        at=row.at,
    )
