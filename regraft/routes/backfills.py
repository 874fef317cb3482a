"""The part of the client that speaks about backfills."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypedDict, Unpack

from regraft.connection import Connection, Json, Problem, Unreachable, read
from regraft.models import BackfillEstimate, BackfillInfo, BackfillList, CurvePoint, FailurePage, ItemFailure
from regraft.paths import change_params, path_of

SILENCE_SECONDS = 30.0
"""A stream that says nothing for so long is broken; the service sends a heartbeat every ten."""
PATIENCE_SECONDS = 60.0
"""How long a stream that breaks is tried again without an event in between: a service may be restarting."""
RECONNECT_SECONDS = 0.5


class CurveOptions(TypedDict, total=False):
    """What to measure while a backfill runs, by which queries; `{}`: recall@10 over items of the gallery."""

    label: str | None
    evaluation: int | None
    sample: int
    metric: str | None
    k: int
    seed: int
    marks: int


class BackfillOptions(TypedDict, total=False):
    """What may be said about a backfill; what is left out is the service's default (docs/http-api.md)."""

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
    """Methods of `regraft.client.Client`."""

    def start_backfill(self, gallery: str, **options: Unpack[BackfillOptions]) -> BackfillInfo:
        """POST /v1/galleries/{gallery}/backfills: move items to `version` (default: the current one)."""
        return self._ask(BackfillInfo, "POST", path_of("galleries", gallery, "backfills"), json=_given(options))

    def estimate_backfill(self, gallery: str, **options: Unpack[BackfillOptions]) -> BackfillEstimate:
        """POST /v1/galleries/{gallery}/backfills as a dry run: items, time, storage and cost."""
        path = path_of("galleries", gallery, "backfills")
        return self._ask(BackfillEstimate, "POST", path, params=change_params(dry_run=True), json=_given(options))

    def backfills(self, gallery: str) -> list[BackfillInfo]:
        """GET /v1/galleries/{gallery}/backfills."""
        return self._ask(BackfillList, "GET", path_of("galleries", gallery, "backfills")).backfills

    def backfill(self, backfill: int) -> BackfillInfo:
        """GET /v1/backfills/{backfill}: state, counters and curve."""
        return self._ask(BackfillInfo, "GET", path_of("backfills", backfill))

    def watch_backfill(self, backfill: int) -> Iterator[BackfillInfo]:
        """GET /v1/backfills/{backfill}/events: the backfill now and after each change, until it ends.

        A stream that breaks is taken up again behind the last event that came.

        Raises:
            Unreachable: nothing came for a minute.
            Problem: the backfill is not there, or was deleted with its gallery.
        """
        return (read(BackfillInfo, data) for data in self._watch(backfill, "progress"))

    def watch_curve(self, backfill: int) -> Iterator[CurvePoint]:
        """GET /v1/backfills/{backfill}/events: each point of its curve, those there are and those that come.

        Raises:
            Unreachable, Problem: as `watch_backfill` does.
        """
        return (read(CurvePoint, data) for data in self._watch(backfill, "point"))

    def _watch(self, backfill: int, wanted: str) -> Iterator[str]:
        last, heard = "", time.monotonic()
        while True:
            headers = {"last-event-id": last} if last else {}
            try:
                for event, number, data in events(
                    self._lines(path_of("backfills", backfill, "events"), headers, SILENCE_SECONDS)
                ):
                    heard = time.monotonic()
                    if event == "end":
                        return
                    if event == "gone":
                        gone = f"backfill {backfill} was deleted with its gallery"
                        raise Problem(404, {"code": "unknown_backfill", "detail": gone})
                    last = number
                    if event == wanted:
                        yield data
                broken = Unreachable(f"the events of backfill {backfill} ended before it did")
            except Unreachable as error:
                broken = error
            if time.monotonic() - heard > PATIENCE_SECONDS:
                raise broken
            time.sleep(RECONNECT_SECONDS)

    def backfill_failures(self, backfill: int) -> list[ItemFailure]:
        """GET /v1/backfills/{backfill}/failures, all pages."""
        path, failures, cursor = path_of("backfills", backfill, "failures"), [], ""
        while True:
            page = self._ask(FailurePage, "GET", path, params={"cursor": cursor} if cursor else {})
            failures += page.failures
            if page.next is None:
                return failures
            cursor = page.next

    def pause_backfill(self, backfill: int, *, dry_run: bool = False) -> BackfillInfo:
        """POST /v1/backfills/{backfill}/pause."""
        return self._ask(BackfillInfo, "POST", path_of("backfills", backfill, "pause"), params=change_params(dry_run))

    def resume_backfill(self, backfill: int, *, dry_run: bool = False) -> BackfillInfo:
        """POST /v1/backfills/{backfill}/resume."""
        return self._ask(BackfillInfo, "POST", path_of("backfills", backfill, "resume"), params=change_params(dry_run))

    def cancel_backfill(self, backfill: int, *, dry_run: bool = False) -> BackfillInfo:
        """POST /v1/backfills/{backfill}/cancel."""
        return self._ask(BackfillInfo, "POST", path_of("backfills", backfill, "cancel"), params=change_params(dry_run))


def events(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    """(event, id, data) of each server-sent event; comments and fields without a use here are passed over."""
    fields = {"event": "message", "id": "", "data": ""}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            if name in fields:
                fields[name] = value.removeprefix(" ")
        elif fields["data"]:
            yield fields["event"], fields["id"], fields["data"]
            fields = {"event": "message", "id": fields["id"], "data": ""}


def _given(options: BackfillOptions) -> Json:
    return {name: value for name, value in options.items() if value is not None}
