"""Server-sent events of a backfill, read by a real client from a real server."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

import httpx
import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from service.http.backfills import progress
from staging.api.served import problem, serving
from staging.api.streams import events

pytestmark = pytest.mark.usefixtures("alone")


WAIT = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.01)


@pytest.fixture
def started(served: Any, pictures: list[bytes]) -> int:
    path = served.filled(pictures, "v1", "v2")
    number: int = served.http.post(f"{path}/backfills", json={"chunk_size": 5}).json()["id"]
    return number


def stream(served: Any, number: int, last: str | bytes = "") -> Any:
    headers = {"last-event-id": last} if last else {}
    return served.http.stream("GET", f"/backfills/{number}/events", headers=headers, timeout=WAIT)


def test_a_watcher_sees_each_state_until_the_end(served: Any, started: int) -> None:
    seen = []
    with stream(served, started) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        found = events(response.iter_text())
        for step in (lambda: served.work(1), lambda: turn(served, started, "pause")):
            seen.append(next(found))
            step()
        seen.append(next(found))
        turn(served, started, "resume")
        served.work()
        seen += list(found)

    shown = [json.loads(data) for name, _, data in seen if name == "progress"]
    assert [(s["state"], s["done"]) for s in shown[:3]] == [("running", 0), ("running", 5), ("paused", 5)]
    assert (shown[-1]["state"], shown[-1]["done"]) == ("done", 20)
    assert seen[-1][0] == "end"
    ids = [int(number) for name, number, _ in seen if name == "progress"]
    assert ids == sorted(set(ids))
    shown[-1].pop("active_seconds")
    now = served.http.get(f"/backfills/{started}").json()
    assert {**now, "active_seconds": 0} == {**shown[-1], "active_seconds": 0}


def turn(served: Any, number: int, action: str) -> None:
    assert served.http.post(f"/backfills/{number}/{action}").status_code == 200


def test_watchers_share_their_reads(served: Any, started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.1)
    reads, snapshot = [], progress.snapshot
    monkeypatch.setattr(progress, "snapshot", lambda *about: reads.append(1) or snapshot(*about))
    with contextlib.ExitStack() as watching:
        told = [events(watching.enter_context(stream(served, started)).iter_text()) for _ in range(6)]
        assert {next(found)[0] for found in told} == {"progress"}
        reads.clear()
        time.sleep(0.5)
        assert 1 <= len(reads) <= 8


def test_whoever_comes_back_is_told_nothing_twice(served: Any, started: int) -> None:
    with stream(served, started) as response:
        _, last, _ = next(events(response.iter_text()))

    with stream(served, started, last) as response:
        found = events(response.iter_text())
        served.work(1)
        assert json.loads(next(found)[2])["done"] > 0


@pytest.mark.parametrize("last", ["nonsense", "-1", "\u0665".encode(), "9" * 20, "9" * 5000])
def test_what_is_no_id_is_told_everything(served: Any, started: int, last: str | bytes) -> None:
    with stream(served, started, last) as response:
        assert next(events(response.iter_text()))[0] == "progress"


def test_silence_is_broken_by_a_sign_of_life(served: Any, started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastapi.routing._PING_INTERVAL", 0.02)
    with stream(served, started) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line.startswith(":"))
        served.work()
        assert "event: end" in list(lines)


def test_a_watcher_who_leaves_leaves_nothing_behind(served: Any, started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = []
    poll = progress.ProgressPoller.poll

    async def noted(*args: Any, **options: Any) -> Any:
        polls.append(args)
        return await poll(*args, **options)

    monkeypatch.setattr(progress.ProgressPoller, "poll", noted)
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.01)
    with stream(served, started) as response:
        next(events(response.iter_text()))
    time.sleep(0.1)
    seen = len(polls)
    time.sleep(0.2)

    assert 0 < len(polls) == seen


def test_an_ended_one_says_so_and_ends(served: Any, started: int) -> None:
    served.work()

    with stream(served, started) as response:
        assert [name for name, _, _ in events(response.iter_text())] == ["progress", "end"]


def test_a_look_reads_the_curve_once(served: Any, started: int) -> None:
    read = []

    def note(_c: Any, _u: Any, statement: str, *_: Any) -> None:
        read.append("FROM backfill_curve" in statement.replace("\n", ""))

    engine = served.runtime.database._reader
    event.listen(engine, "before_cursor_execute", note)
    progress.snapshot(served.runtime, started)
    event.remove(engine, "before_cursor_execute", note)

    assert sum(read) == 1


def test_a_gallery_deleted_meanwhile_ends_the_stream(served: Any, started: int) -> None:
    name = served.http.get(f"/backfills/{started}").json()["gallery"]
    with stream(served, started) as response:
        found = events(response.iter_text())
        next(found)
        served.remove(f"/galleries/{name}")
        assert list(found)[-1][0] == "gone"


def test_a_stream_goes_on_when_the_database_is_back(
    served: Any, started: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = threading.Semaphore(0)

    def away(*_: Any) -> None:
        tried.release()
        raise OperationalError("select 1", {}, Exception("the server closed the connection"))

    with stream(served, started) as response:
        found = events(response.iter_text())
        next(found)
        with monkeypatch.context() as patch:
            patch.setattr(progress, "snapshot", away)
            for _ in range(2):
                assert tried.acquire(timeout=WAIT)
        served.work()
        seen = list(found)

    assert json.loads(seen[-2][2])["state"] == "done"
    assert seen[-1][0] == "end"
    assert "Traceback" not in caplog.text


def test_an_unknown_one_is_a_problem(served: Any) -> None:
    problem(served.http.get("/backfills/999999/events"), 404, "unknown_backfill")


def test_a_server_that_stops_ends_its_streams(tmp_path: Any, versions: Any, pictures: Any) -> None:
    from service.settings import Settings

    with serving(Settings(data=tmp_path)) as running:
        running.register(versions["v1"])
        path = running.gallery("v1")
        running.ingest(path, {"a": pictures[0]})
        running.register(versions["v2"])
        running.http.post(f"{path}/deployments", json={"version": "v2"})
        number = running.http.post(f"{path}/backfills", json={}).json()["id"]
        with httpx.stream("GET", f"{running.http.base_url}backfills/{number}/events", timeout=WAIT) as response:
            found = events(response.iter_text())
            next(found)
            running.runtime.stopping.set()
            assert list(found) == []
