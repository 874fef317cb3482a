"""Client methods for backfills."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple, TypedDict, Unpack

from regraft.connection import Connection, Json, Problem, Unreachable, read
from regraft.models import BackfillEstimate, BackfillInfo, BackfillList, CurvePoint, FailurePage, ItemFailure
from regraft.paths import change_params, limit_params, path_of
from regraft.routes.route import route, stream

SILENCE_SECONDS = 30.0
"""Seconds without a line after which a stream is broken; the service sends a comment every 15 seconds."""
PATIENCE_SECONDS = 60.0
"""Seconds of silence for which a broken stream is reconnected, because the service may be restarting."""
RESTARTING = {502, 503, 504}
"""Answers of a proxy whose service is restarting, and of one that shuts down."""
RECONNECT_SECONDS = 0.5
LINE_END = re.compile("\r\n|\n|\r")


class CurveOptions(TypedDict, total=False):
    """The curve that a backfill measures, and its queries; `{}`: recall@10 with items of the gallery as queries."""

    label: str | None
    evaluation: int | None
    sample: int
    metric: str | None
    k: int
    seed: int
    marks: int


class BackfillOptions(TypedDict, total=False):
    """The options of a backfill; their defaults are the service's (docs/http-api.md)."""

    version: str | None
    kind: str
    order: str
    chunk_size: int | None
    rate: float | None
    share: float | None
    limit: int | None
    origin: str | None
    filter: Json | None
    attempts: int
    curve: CurveOptions | None


class BackfillRoutes(Connection):
    """Methods of both clients."""

    @route
    async def start_backfill(self, gallery: str, **options: Unpack[BackfillOptions]) -> BackfillInfo:
        """POST /v1/galleries/{gallery}/backfills: move items to `version` (default: the current one)."""
        return await self._ask(
            BackfillInfo, "POST", path_of("galleries", gallery, "backfills"), json=_without_none(options)
        )

    @route
    async def estimate_backfill(self, gallery: str, **options: Unpack[BackfillOptions]) -> BackfillEstimate:
        """POST /v1/galleries/{gallery}/backfills as a dry run: items, time, storage and cost."""
        path = path_of("galleries", gallery, "backfills")
        return await self._ask(
            BackfillEstimate, "POST", path, params=change_params(dry_run=True), json=_without_none(options)
        )

    @route
    async def backfills(self, gallery: str, *, limit: int | None = None) -> list[BackfillInfo]:
        """GET /v1/galleries/{gallery}/backfills: all, or the newest `limit`, oldest first."""
        path = path_of("galleries", gallery, "backfills")
        return (await self._ask(BackfillList, "GET", path, params=limit_params(limit))).backfills

    @route
    async def backfill(self, backfill: int) -> BackfillInfo:
        """GET /v1/backfills/{backfill}: state, counters and curve."""
        return await self._ask(BackfillInfo, "GET", path_of("backfills", backfill))

    @stream
    async def watch_backfill(self, backfill: int) -> AsyncGenerator[BackfillInfo, None]:
        """GET /v1/backfills/{backfill}/events: the backfill now and after each change, until it ends.

        A broken stream is resumed after the last event received.

        Raises:
            Unreachable: no event for a minute.
            UnexpectedAnswer: the stream cannot be decompressed.
            Problem: the backfill does not exist, or was deleted with its gallery.
        """
        async with aclosing(self._watch(backfill, "progress")) as events:
            async for data in events:
                yield read(BackfillInfo, data)

    @stream
    async def watch_curve(self, backfill: int) -> AsyncGenerator[CurvePoint, None]:
        """GET /v1/backfills/{backfill}/events: the points of its curve, existing and future ones.

        Raises:
            Unreachable, UnexpectedAnswer, Problem: as `watch_backfill`.
        """
        async with aclosing(self._watch(backfill, "point")) as events:
            async for data in events:
                yield read(CurvePoint, data)

    async def _watch(self, backfill: int, wanted: str) -> AsyncGenerator[str, None]:
        last, heard = "", time.monotonic()
        while True:
            broken: Unreachable | Problem
            try:
                async with aclosing(self._events(backfill, last)) as events:
                    async for event in events:
                        heard = time.monotonic()
                        if event is None:
                            continue
                        last = event.id
                        if event.name == "end":
                            return
                        if event.name == wanted:
                            yield event.data
                broken = Unreachable(f"the events of backfill {backfill} ended before it did")
            except Unreachable as error:
                broken = error
            except Problem as error:
                if error.status not in RESTARTING:
                    raise
                broken = error
            if time.monotonic() - heard > PATIENCE_SECONDS:
                raise broken
            await self._pause(RECONNECT_SECONDS)

    async def _events(self, backfill: int, last: str) -> AsyncGenerator[Event | None, None]:
        """The events after the one with the id `last`, until the stream breaks; None: only a sign of life."""
        headers, events = {"last-event-id": last} if last else {}, Events()
        async with aclosing(self._texts(path_of("backfills", backfill, "events"), headers, SILENCE_SECONDS)) as texts:
            async for text in texts:
                yield None
                for event in events.after(text):
                    if event.name == "gone":
                        gone = f"backfill {backfill} was deleted with its gallery"
                        raise Problem(404, {"code": "unknown_backfill", "detail": gone})
                    yield event

    @route
    async def backfill_failures(self, backfill: int) -> list[ItemFailure]:
        """GET /v1/backfills/{backfill}/failures, all pages."""
        path, failures, cursor = path_of("backfills", backfill, "failures"), [], ""
        while True:
            page = await self._ask(FailurePage, "GET", path, params={"cursor": cursor} if cursor else {})
            failures += page.failures
            if page.next is None:
                return failures
            cursor = page.next

    @route
    async def pause_backfill(self, backfill: int, *, dry_run: bool = False) -> BackfillInfo:
        """POST /v1/backfills/{backfill}/pause."""
        return await self._ask(
            BackfillInfo, "POST", path_of("backfills", backfill, "pause"), params=change_params(dry_run)
        )

    @route
    async def resume_backfill(self, backfill: int, *, dry_run: bool = False) -> BackfillInfo:
        """POST /v1/backfills/{backfill}/resume."""
        return await self._ask(
            BackfillInfo, "POST", path_of("backfills", backfill, "resume"), params=change_params(dry_run)
        )

    @route
    async def cancel_backfill(self, backfill: int, *, dry_run: bool = False) -> BackfillInfo:
        """POST /v1/backfills/{backfill}/cancel."""
        return await self._ask(
            BackfillInfo, "POST", path_of("backfills", backfill, "cancel"), params=change_params(dry_run)
        )


class Event(NamedTuple):
    """A server-sent event."""

    name: str
    id: str
    data: str


class Events:
    """Parses server-sent events (WHATWG HTML, 9.2); skips comments and unused fields.

    Lines end at CR, LF or both, not at the other line breaks of Unicode, which data may hold.
    """

    def __init__(self) -> None:
        self._fields = {"event": "message", "id": "", "data": ""}
        self._rest, self._after_cr = "", False

    def after(self, text: str) -> list[Event]:
        """The events that the next part of the stream completes."""
        if self._after_cr:
            text = text.removeprefix("\n")  # the CR has ended the line
        self._after_cr = text.endswith("\r")
        *lines, self._rest = LINE_END.split(self._rest + text)
        return [event for line in lines if (event := self._after_line(line)) is not None]

    def _after_line(self, line: str) -> Event | None:
        if line:
            name, _, value = line.partition(":")
            if name in self._fields:
                self._fields[name] = value.removeprefix(" ")
        elif self._fields["data"]:
            event = Event(self._fields["event"], self._fields["id"], self._fields["data"])
            self._fields = {"event": "message", "id": event.id, "data": ""}
            return event
        return None


def _without_none(options: BackfillOptions) -> Json:
    return {name: value for name, value in options.items() if value is not None}
