"""Logs: one form for everything that a process says, and what a line tells."""

from __future__ import annotations

import io
import json
import logging
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from index.encoders.image import decode_image
from index.errors import InvalidImage
from index.events import CONTEXT, Event
from regraft.commands import processes
from service.backfills import worker
from service.http import app
from service.logs import FORMATTERS, HANDLER, LogFormat, RecurringErrors, configure
from service.settings import Settings
from service.store.database.connections import Database
from staging.logged import log_as_before

logger = logging.getLogger("service.test")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with log_as_before():
        yield


def lines(log_format: LogFormat, *say: Any) -> list[str]:
    """What is written when these say something."""
    configure(log_format, "info")
    (handler,) = [one for one in logging.getLogger().handlers if one.get_name() == HANDLER]
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream := io.StringIO())
    for each in say:
        each()
    return stream.getvalue().splitlines()


def test_an_event_is_one_line_whatever_it_holds() -> None:
    (line,) = lines("console", lambda: logger.info(Event("lost", gallery="g", items=3, why="it\nwas 'so'", empty="")))

    assert line.endswith("""INFO service.test: action=lost gallery=g items=3 why="it\\nwas 'so'" empty=''""")


def test_what_libraries_say_of_their_parts_is_no_line() -> None:
    says = [logging.getLogger(name).info for name in ("alembic.runtime.plugins", "faiss.loader", "httpx")]

    assert lines("console", *(partial(say, "looking") for say in says)) == []


def test_a_warning_of_python_is_a_line_too() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        (line,) = lines("json", lambda: warnings.warn("Invalid value.", stacklevel=1))

    told = json.loads(line)
    assert told["level"] == "warning"
    assert "Invalid value." in told["event"]


def test_an_image_cannot_fill_the_log() -> None:
    fields = b"".join(struct.pack("<HHII", 256 + number, 12, 1 << 28, 8) for number in range(2000))
    tiff = b"II*\0" + struct.pack("<IH", 8, 2000) + fields

    def refused() -> None:
        with pytest.raises(InvalidImage):
            decode_image(tiff)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert lines("json", refused) == []


def test_as_json_an_event_has_its_fields_and_another_line_its_message() -> None:
    def fails() -> None:
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            logger.exception(Event("failed", path=Path("a"), items=3))

    event, other = map(json.loads, lines("json", fails, lambda: logging.getLogger("uvicorn.error").warning("%s", "x")))

    assert event.pop("time").endswith("Z")
    assert "ZeroDivisionError" in event.pop("exception")
    assert event == {"level": "error", "logger": "service.test", "event": "failed", "path": "a", "items": 3}
    assert (other["logger"], other["event"], other["level"]) == ("uvicorn.error", "x", "warning")


@pytest.mark.parametrize("log_format", FORMATTERS)
def test_every_line_of_a_request_names_it(log_format: LogFormat) -> None:
    def in_a_request() -> None:
        before = CONTEXT.set({"request": "r1"})
        logger.info(Event("indexed"))
        logging.getLogger("sqlalchemy").warning("slow")
        CONTEXT.reset(before)

    *mine, after = lines(log_format, in_a_request, lambda: logger.info(Event("indexed")))

    assert len(mine) == 2
    assert all(line.count("r1") == 1 for line in mine)
    assert "request" not in after


def test_what_a_request_logs_on_another_thread_names_it(
    served: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = served.gallery("v1")

    def broken(*_: object) -> None:
        logger.error(Event("about_to_fail"))
        raise RuntimeError

    monkeypatch.setattr(Database, "read", broken)
    failed = served.http.get(f"{path}/items")

    told = [record.msg for record in caplog.records if isinstance(record.msg, Event)]
    # The thread that follows the feed may fail meanwhile, too, for no request.
    mine = [event.name for event in told if event.fields.get("request") == failed.json()["request_id"]]
    assert mine == ["about_to_fail", "request_failed"]


def test_a_request_that_meets_no_database_is_one_line_with_the_reason(
    served: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(_: Database) -> Connection:
        raise OperationalError("select 1", None, Exception("connection refused\nis it running?"))

    monkeypatch.setattr(Database, "lookup", away)
    refused = served.http.get("/audit")

    mine = [one for one in caplog.records if refused.json()["request_id"] in str(one.msg)]
    (line,) = map(logging.Formatter().format, mine)
    assert "connection refused" in line
    assert "\n" not in line


@pytest.mark.parametrize("process", ["serve", "worker", "remote"])
def test_every_process_is_configured_by_the_same_settings(
    process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGRAFT_LOG_FORMAT", "json")
    monkeypatch.setenv("REGRAFT_LOG_LEVEL", "warning")
    monkeypatch.setenv("REGRAFT_DATA", str(tmp_path))
    monkeypatch.setattr("service.http.app.Server.run", lambda self, *_: setattr(self, "started", True))
    monkeypatch.setattr("service.http.app.signal.signal", lambda *_: None)
    monkeypatch.setattr(app, "_share_interpreter", lambda: None)
    stop = threading.Event()
    stop.set()

    if process == "serve":
        app.serve(Settings())
    elif process == "worker":
        worker.run(Settings(), stop)
    else:
        processes._work_remotely("http://127.0.0.1:1", None, None, stop)

    root = logging.getLogger()
    (handler,) = [one for one in root.handlers if one.get_name() == HANDLER]
    assert isinstance(handler.formatter, FORMATTERS["json"])
    assert root.level == logging.WARNING
    assert not logging.getLogger("uvicorn").handlers


def test_an_error_of_every_round_is_logged_when_it_comes_and_once_a_minute_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, errors = iter([*map(float, range(90)), 90.0, 91.0]), RecurringErrors(logger)
    monkeypatch.setattr("service.logs.time.monotonic", lambda: next(clock))

    def round_(gallery: str, fail: Callable[[], object]) -> None:
        try:
            fail()
        except Exception:
            errors.log(Event("index_failed", gallery=gallery))

    for _ in range(90):
        round_("a", lambda: int("x"))
    round_("b", lambda: int("x"))
    round_("a", {}.popitem)

    assert [(str(r.msg), r.exc_info[0]) for r in caplog.records if r.exc_info] == [
        ("action=index_failed gallery=a", ValueError),
        ("action=index_failed gallery=a", ValueError),
        ("action=index_failed gallery=b", ValueError),
        ("action=index_failed gallery=a", KeyError),
    ]
