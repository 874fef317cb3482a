"""The public description of a backfill (`describe`): its state, progress and remaining time, once or as events.

A `progress` event has the whole description, so a watcher needs only the newest one. Its id is the backfill's revision,
which grows with every change. Each point of the curve is also an event, with the id just below that of its progress
event. A watcher that reconnects with its last id gets no event twice and misses no point.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.concurrency import run_in_threadpool

from regraft.models import BackfillInfo
from service.backfills.records import RetryingBackfill, UnknownBackfill, backfill_row
from service.backfills.states import ACTIVE, BackfillState
from service.http.backfills.access import KEY_OPENS_BACKFILL
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.dependencies import Service
from service.registry.registry import Registry
from service.runtime import Runtime
from service.schemas import Number
from service.store.api_keys import ApiKeyRow
from service.store.galleries.gallery import gallery_row
from service.upgrades.curves.points import Curve, CurveState, curve_of

router = APIRouter(route_class=CheckedRoute, tags=["backfills"])

POLL_SECONDS = 0.25
"""How often a watched backfill is read."""
EVENTS = "text/event-stream"
EVENT: dict[str, Any] = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "event": {"type": "string", "enum": ["progress", "point", "gone", "end"]},
        "id": {"type": "string"},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}
NOTHING = -1
"""The last event's id of a watcher that has seen none."""
ID_DIGITS = 19
"""Most digits of an id; Python refuses to parse numbers of thousands of digits."""


async def poller_of(number: Number, service: Service) -> ProgressPoller:
    """The poller that all watchers of a backfill share. Raises UnknownBackfill, before the stream begins."""
    poller: ProgressPoller = service.progress_pollers.setdefault(number, ProgressPoller(service, number))
    await poller.poll(fresh=True)
    return poller


@router.get(
    "/backfills/{number}/events",
    dependencies=[KEY_OPENS_BACKFILL],
    response_class=EventSourceResponse,
    responses={200: {"content": {EVENTS: {"itemSchema": EVENT}}}},
)
async def events(
    request: Request,
    service: Service,
    poller: Annotated[ProgressPoller, Depends(poller_of)],
    last_event_id: Annotated[str, Header()] = "",
) -> AsyncIterator[ServerSentEvent]:
    """Stream a backfill as server-sent events: `progress` after each change, and each new `point` of its curve.

    The stream ends when the backfill and its curve, if any, are complete, or when the request's key is deleted.
    While the database is unavailable, no events are sent.
    """
    key: ApiKeyRow | None = request.state.key
    # A client that disconnects cancels this while it waits and holds nothing. FastAPI keeps the connection alive.
    seen = _number(last_event_id)
    while not service.stopping.is_set() and (key is None or service.keys.is_current(key)):
        try:
            now = await poller.poll()
        except UnknownBackfill:
            yield ServerSentEvent(event="gone", data={})
            return
        except (OperationalError, PoolTimeout):
            await asyncio.sleep(POLL_SECONDS)
            continue
        for event in now.events_after(seen):
            yield event
        seen = now.revision
        if now.over:
            yield ServerSentEvent(event="end", data={})
            return
        await asyncio.sleep(POLL_SECONDS)


def _number(last: str) -> int:
    """The id of the last event; NOTHING if the header is not an id."""
    return int(last) if last.isascii() and last.isdigit() and len(last) <= ID_DIGITS else NOTHING


@dataclass(frozen=True)
class Snapshot:
    """A backfill at one moment: its revision, its public description, and the ids of its points' events."""

    revision: int
    shown: BackfillInfo
    points: Sequence[int]

    @property
    def over(self) -> bool:
        """Whether nothing about it will change any more."""
        curve = self.shown.curve
        return self.shown.state not in ACTIVE and (curve is None or curve.state != CurveState.MEASURING)

    def events_after(self, seen: int) -> Iterator[ServerSentEvent]:
        """The events after the last id that a watcher saw; an id above the revision counts as NOTHING."""
        seen = NOTHING if seen > self.revision else seen
        for event, point in zip(self.points, self.shown.curve.points if self.shown.curve else (), strict=True):
            if event > seen:
                yield _event(event, "point", point)
        if self.revision > seen:
            yield _event(self.revision, "progress", self.shown)


class ProgressPoller:
    """Reads one backfill for all its watchers, who share each read."""

    def __init__(self, service: Runtime, number: int) -> None:
        self._service = service
        self._number = number
        self._lock = asyncio.Lock()
        self._latest: Snapshot | None = None
        self._due = 0.0

    async def poll(self, *, fresh: bool = False) -> Snapshot:
        """The backfill's state of less than `POLL_SECONDS` ago, with `fresh` its current one. Raises UnknownBackfill.

        `fresh` is for new watchers, which may have seen a later state through another process.
        """
        async with self._lock:
            if fresh or self._latest is None or time.monotonic() >= self._due:
                self._due = time.monotonic() + POLL_SECONDS
                self._latest = None
                self._latest = await run_in_threadpool(snapshot, self._service, self._number)
            return self._latest


def _event(number: int, name: str, data: BaseModel) -> ServerSentEvent:
    return ServerSentEvent(id=str(number), event=name, raw_data=data.model_dump_json())


def snapshot(service: Runtime, number: int) -> Snapshot:
    """The current state of a backfill. Raises UnknownBackfill."""
    with service.database.read() as connection:
        row = backfill_row(connection, number)
        gallery = gallery_row(connection, row.gallery_id)
        assert gallery is not None
        curve = curve_of(connection, number)
    shown = describe(service.registry, gallery.name, row, curve)
    return Snapshot(row.revision, shown, curve.events if curve else ())


def describe(registry: Registry, gallery_name: str, row: RetryingBackfill, curve: Curve | None) -> BackfillInfo:
    """The public description of a backfill and its curve."""
    remaining = max(row.total - row.settled, 0)  # items may be supplied before all are counted
    active = row.active_seconds + max(row.running_seconds, 0.0)  # a clock that was set back counts nothing
    planning = row.sweep_seq is not None and row.state in ACTIVE
    speed = row.settled / active if row.settled and active > 0 else None
    # The burst that a rate permits at the start does not last.
    lasting = speed if speed is None or row.rate is None else min(speed, row.rate)
    return BackfillInfo(
        id=row.id,
        gallery=gallery_name,
        version=registry.by_id(row.version_id).name,
        kind=row.kind,
        order=row.item_order,
        state=row.state,
        planning=planning,
        total=row.total,
        done=row.done,
        skipped=row.skipped,
        failed=row.failed,
        retrying=row.retrying,
        remaining=remaining,
        rate=row.rate,
        share=row.share,
        limit=row.item_limit,
        origin=row.origin,
        filter=row.filter,
        attempts=row.attempts,
        created=row.created,
        finished=row.finished,
        active_seconds=active,
        items_per_second=speed,
        eta_seconds=remaining / lasting if lasting and row.state == BackfillState.RUNNING and not planning else None,
        curve=None if curve is None else curve.shown,
    )
