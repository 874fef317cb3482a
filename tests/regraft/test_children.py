"""`serve` keeps its workers running, and ends them with itself."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import pytest

from regraft.commands import children
from regraft.commands.children import Workers
from staging.waiting import until

SLEEPING = "import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); {SLEEPING}"


@pytest.fixture
def started(monkeypatch):
    """Every process that was started, running the code that is set on the fixture instead of a worker."""

    class Started(list):
        code = SLEEPING

        def start(self) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([sys.executable, "-c", self.code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.append(process)
            return process

    made = Started()
    monkeypatch.setattr(children, "start_worker", made.start)
    yield made
    for process in made:
        process.kill()
        process.communicate()


def test_as_many_workers_run_as_were_asked_for_and_none_is_left_behind(started):
    with Workers(2):
        until(lambda: len(started) == 2)
        assert [process.poll() for process in started] == [None, None]

    assert all(process.poll() is not None for process in started)


def test_a_worker_that_dies_is_started_again(started, monkeypatch, caplog):
    monkeypatch.setattr(children, "RESTART_PAUSE_SECONDS", 0.0)
    with Workers(1):
        until(lambda: len(started) == 1)
        started[0].kill()
        until(lambda: len(started) == 2)
        assert started[1].poll() is None

    assert "action=worker_ended code=-9" in caplog.text


def test_a_worker_is_started_once_the_system_permits_it_again(monkeypatch, caplog):
    monkeypatch.setattr(children, "RESTART_PAUSE_SECONDS", 0.0)
    starts = iter([OSError(errno.EAGAIN, "Resource temporarily unavailable"), OSError(errno.ENOMEM, "no memory")])
    made = []

    def start() -> subprocess.Popen[bytes]:
        if (refused := next(starts, None)) is not None:
            raise refused
        made.append(subprocess.Popen([sys.executable, "-c", SLEEPING], stdin=subprocess.PIPE))
        return made[-1]

    monkeypatch.setattr(children, "start_worker", start)
    with Workers(1):
        until(lambda: len(made) == 1)

    assert made[0].poll() is not None
    made[0].stdin.close()
    assert caplog.text.count("action=worker_not_started reason=") == 2


def test_a_worker_that_does_not_listen_is_killed_in_the_end(started, monkeypatch):
    monkeypatch.setattr(children, "STOP_SECONDS", 0.2)
    started.code = STUBBORN
    with Workers(1):
        until(lambda: len(started) == 1)
        started[0].stdout.readline()

    assert started[0].returncode == -9


def test_workers_end_also_when_the_service_fails(started):
    def serve() -> None:
        with Workers(1):
            until(lambda: len(started) == 1)
            raise OSError("address in use")

    with pytest.raises(OSError, match="in use"):
        serve()

    assert started[0].poll() is not None


def test_a_worker_of_a_service_stops_when_its_input_ends(monkeypatch):
    reading, writing = os.pipe()
    stop = threading.Event()
    with os.fdopen(reading) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        watching = threading.Thread(target=children.stop_with_parent, args=(stop,), daemon=True)
        watching.start()
        assert not stop.wait(0.05)

        os.close(writing)
        watching.join(5)

    assert stop.is_set()
