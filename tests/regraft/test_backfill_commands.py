"""Backfills started, watched and steered by the command."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from regraft.client import Client
from regraft.models import BackfillEstimate, BackfillInfo
from regraft.routes import backfills
from staging.api.answers import filled

BACKFILL = filled(
    BackfillInfo,
    {
        "id": 3,
        "version": "v2",
        "kind": "reencode",
        "state": "done",
        "total": 4,
        "done": 4,
        "skipped": 0,
        "failed": 0,
        "remaining": 0,
    },
)


def test_watching_a_backfill_ends_when_it_ends(run, service, monkeypatch):
    monkeypatch.setattr(backfills, "RECONNECT_SECONDS", 0.0)
    running = {**BACKFILL, "state": "running", "done": 1, "remaining": 3}
    service.answers["POST /v1/galleries/g/backfills"] = running
    first, second = (f"id: {n}\nevent: progress\ndata: {json.dumps(b)}\n\n" for n, b in ((7, running), (9, BACKFILL)))
    # The stream breaks in the middle of an event, and is taken up behind the last whole one.
    streams = [first + second[:20], ": hello\n\n" + second + "event: end\ndata: {}\n\n"]
    service.answers["GET /v1/backfills/3/events"] = [httpx.Response(200, text=text) for text in streams]

    code, shown, _ = run("backfill", "start", "g", "--rate", 100, "--watch")

    assert code == 0
    assert shown == "backfill 3: reencode to v2 is done (4 done, 0 skipped, 0 failed, 0 remaining)\n"
    assert json.loads(service.requests[0].content) == {
        "kind": "reencode",
        "order": "random",
        "rate": 100,
        "attempts": 3,
    }
    assert [r.headers.get("last-event-id") for r in service.requests[1:]] == [None, "7"]


POINT = {"share": 0.0, "moved": 0, "meanwhile": 0, "low": 0.4, "high": 0.7, "queries": 20, "seq": 9, "at": 1.0}


CURVE: dict[str, Any] = {
    "state": "complete",
    "error": None,
    "metric": "cmc@1",
    "points": [
        {**POINT, "value": 0.5},
        {**POINT, "share": 0.5, "moved": 1, "meanwhile": 2, "value": 0.48},
        {**POINT, "share": 1.0, "moved": 4, "value": 0.64},
    ],
    "area": 0.525,
    "largest_dip": 0.02,
}


def test_a_backfill_with_a_curve_shows_it(run, service):
    service.answers["POST /v1/galleries/g/backfills"] = {**BACKFILL, "curve": CURVE}

    code, shown, _ = run("backfill", "start", "g", "--label", "kind", "--metric", "cmc@1", "--marks", 2, "--seed", 0)

    assert code == 0
    sent = json.loads(service.requests[0].content)["curve"]
    assert sent == {"label": "kind", "metric": "cmc@1", "marks": 2, "seed": 0}
    assert [line.rstrip() for line in shown.splitlines()[1:]] == [
        "cmc@1 50.0% ▂▁█ 64.0%, largest dip 2.0%, area 52.5%: complete",
        "share   moved   cmc@1                 queries",
        "0.0%    0       50.0% [40.0%, 70.0%]  20",
        "50.0%   1 to 3  48.0% [40.0%, 70.0%]  20",
        "100.0%  4       64.0% [40.0%, 70.0%]  20",
    ]


def test_a_curve_that_was_given_up_says_why(run, service):
    flat = {**CURVE, "points": CURVE["points"][:1], "state": "stopped", "error": "no more images", "area": None}
    service.answers["GET /v1/backfills/3"] = {**BACKFILL, "curve": flat}

    assert run("backfill", "show", 3)[1].splitlines()[1:3] == [
        "cmc@1 50.0% ▁ 50.0%, largest dip 2.0%: stopped",
        "  no more images",
    ]


def test_points_are_watched_apart_from_the_rest(service):
    points = [f"id: {n}\nevent: point\ndata: {json.dumps(POINT | {'moved': n, 'value': 0.5})}\n\n" for n in (2, 4)]
    progress = f"id: 5\nevent: progress\ndata: {json.dumps(BACKFILL)}\n\n"
    service.answers["GET /v1/backfills/3/events"] = httpx.Response(
        200, text="".join([points[0], points[1], progress, "event: end\ndata: {}\n\n"])
    )

    transport = httpx.MockTransport(service)
    with Client(transport=transport) as client:
        assert [point.moved for point in client.watch_curve(3)] == [2, 4]
    with Client(transport=transport) as client:
        assert [shown.id for shown in client.watch_backfill(3)] == [BACKFILL["id"]]


def test_a_backfill_whose_filter_holds_line_breaks_of_unicode_is_watched(service):
    odd = {"field": "title", "eq": "a\u2028b\u2029c\x85d"}
    text = json.dumps({**BACKFILL, "filter": odd}, ensure_ascii=False)
    stream = f"id: 5\r\nevent: progress\r\ndata: {text}\r\n\r\nevent: end\rdata: {{}}\r\r".encode()

    class InParts(httpx.SyncByteStream):
        def __iter__(self):
            yield from (stream[at : at + 1] for at in range(len(stream)))

    service.answers["GET /v1/backfills/3/events"] = httpx.Response(200, stream=InParts())
    with Client(transport=httpx.MockTransport(service)) as client:
        assert [shown.filter for shown in client.watch_backfill(3)] == [odd]


@pytest.mark.parametrize("restart", [httpx.ConnectError("refused"), httpx.Response(502), httpx.Response(503, json={})])
def test_a_watch_outlasts_a_restart_after_a_long_silence_in_which_the_service_was_there(monkeypatch, restart):
    clock = [0.0]
    pauses: list[float] = []
    monkeypatch.setattr(backfills, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    progress = f"id: 5\nevent: progress\ndata: {json.dumps(BACKFILL)}\n\n".encode()

    class Quiet(httpx.SyncByteStream):
        def __iter__(self):
            yield progress
            for _ in range(5):
                clock[0] += 15
                yield b": ping\n\n"
            clock[0] += 15

    answers = [httpx.Response(200, stream=Quiet()), restart, httpx.Response(200, text="event: end\ndata: {}\n\n")]

    def answer(_):
        found = answers.pop(0)
        if isinstance(found, httpx.TransportError):
            raise found
        return found

    monkeypatch.setattr(time, "sleep", pauses.append)
    with Client(transport=httpx.MockTransport(answer)) as client:
        assert [shown.id for shown in client.watch_backfill(3)] == [BACKFILL["id"]]
    assert (answers, len(pauses)) == ([], 2)


def test_a_backfill_that_failed_for_items_names_them(run, service):
    service.answers["GET /v1/backfills/3"] = {**BACKFILL, "failed": 1}
    service.answers["GET /v1/backfills/3/failures"] = [
        {"failures": [{"item": "a", "reason": "dark"}], "next": "x"},
        {"failures": [{"item": "b", "reason": "no image"}]},
    ]

    assert run("backfill", "show", 3)[1].splitlines()[-2:] == ["  a: dark", "  b: no image"]
    assert service.requests[-1].url.params["cursor"] == "x"


def test_a_watched_backfill_says_by_its_exit_code_that_items_failed(run, service):
    failed = {**BACKFILL, "failed": 1}
    service.answers["GET /v1/backfills/3"] = failed
    service.answers["GET /v1/backfills/3/failures"] = {"failures": [{"item": "a", "reason": "dark"}], "next": None}
    events = f"id: 1\nevent: progress\ndata: {json.dumps(failed)}\n\nevent: end\ndata: {{}}\n\n"
    service.answers["GET /v1/backfills/3/events"] = httpx.Response(200, text=events)

    assert run("backfill", "watch", 3)[0] == 3


def test_a_backfill_deleted_while_it_is_watched_is_an_error(run, service):
    service.answers["GET /v1/backfills/3"] = BACKFILL
    service.answers["GET /v1/backfills/3/events"] = httpx.Response(200, text="event: gone\ndata: {}\n\n")

    code, _, shown = run("backfill", "watch", 3)

    assert (code, "was deleted with its gallery" in shown) == (1, True)


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
def test_each_verb_of_backfill_reaches_its_route(run, service, verb):
    service.answers[f"POST /v1/backfills/3/{verb}"] = BACKFILL

    assert run("backfill", verb, 3)[0] == 0


def test_a_backfill_that_waits_for_embeddings_can_have_a_curve(run, service):
    service.answers["POST /v1/galleries/g/backfills"] = {**BACKFILL, "kind": "supplied"}

    assert run("backfill", "start", "g", "--kind", "supplied", "--evaluation", 2, "--metric", "mAP@1.0")[0] == 0

    sent = json.loads(service.requests[-1].content)
    assert (sent["kind"], sent["curve"]) == ("supplied", {"evaluation": 2, "metric": "mAP@1.0"})


def test_estimate_asks_what_start_asks_without_starting(run, service):
    service.answers["POST /v1/galleries/g/backfills"] = filled(BackfillEstimate, {"items": 4})
    for command in (("estimate",), ("start", "--dry-run")):
        run("backfill", *command, "g", "--rate", 100, "--share", 0.5, "--kind", "transform")

    estimated, started = ((r.url.params, r.content) for r in service.requests)
    assert estimated == started
    assert estimated[0]["dry_run"] == "true"


def test_an_estimate_counts_the_items_that_no_image_or_text_reencodes(run, service):
    """Not only those without an image: a version of texts cannot embed images."""
    service.answers["POST /v1/galleries/g/backfills"] = filled(BackfillEstimate, {"items": 4, "without_image": 30})

    shown = run("backfill", "estimate", "g")[1].splitlines()
    assert shown[1].rstrip() == "items          4 (30 more that the version cannot embed)"
    assert all(line.strip() for line in shown)


def test_a_backfill_that_is_still_planned_says_so(run, service):
    service.answers["POST /v1/galleries/g/backfills"] = {**BACKFILL, "state": "running", "planning": True}

    assert "is running, planning (" in run("backfill", "start", "g")[1]
