"""What the log says while PostgreSQL is away."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path

import pytest

from service.settings import Settings
from service.store import outages
from service.store.outages import OutageLog
from staging.api.served import serving
from staging.external.postgres import Server
from staging.waiting import until


class Counted(OutageLog):
    """Also notes which threads met the outage."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def log(self, error: BaseException) -> None:
        super().log(error)
        self.threads.add(threading.current_thread().name)


def test_a_stopped_server_is_one_line_of_all_threads_without_a_traceback(
    own_server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted()
    monkeypatch.setattr(outages, "OUTAGES", counted)
    settings = Settings(data=tmp_path / "data", database_url=own_server.create_migrated())
    with serving(settings) as served:
        caplog.clear()
        own_server.stop(signal.SIGQUIT)
        until(lambda: len(counted.threads) > 3)
        own_server.start()
        until(lambda: served.http.get("/health/ready").status_code == 200)

    lines = [logging.Formatter().format(record) for record in caplog.records if record.levelno >= logging.ERROR]
    (line,) = [line for line in lines if "action=request_" not in line]
    assert line.startswith("action=database_unavailable reason=")
    assert "\n" not in line
    assert not [record for record in caplog.records if record.exc_info]
