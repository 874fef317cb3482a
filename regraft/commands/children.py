"""Child processes of `regraft serve`: start them, restart those that die, and end them when this process ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import ClassVar, Self

from index.events import Event
from regraft.commands.settings import FOLLOW_PARENT
from regraft.own_packages import HERE

STOP_SECONDS = 15.0
"""Seconds a worker has to finish its chunk when it is stopped; else its lease expires."""
RESTART_PAUSE_SECONDS = 1.0
LISTENING = "REGRAFT_LISTENING_SOCKET"
"""Environment variable of server processes: the file descriptor of the socket that all accept from."""

logger = logging.getLogger(__name__)


class Children:
    """Child processes for the time of this context; one that dies is restarted."""

    kind: ClassVar[str]

    def __init__(self, count: int) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._keep_running, daemon=True) for _ in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _keep_running(self) -> None:
        while not self._stop.is_set():
            try:
                process = self._start()
            except OSError as error:  # the system has no memory or process left at the moment
                logger.warning(Event(f"{self.kind}_not_started", reason=str(error)))
                self._stop.wait(RESTART_PAUSE_SECONDS)
                continue
            while process.poll() is None and not self._stop.wait(0.1):
                pass
            if process.poll() is None:
                _end(process)
            elif not self._stop.wait(RESTART_PAUSE_SECONDS):
                logger.error(Event(f"{self.kind}_ended", code=process.returncode))

    def _start(self) -> subprocess.Popen[bytes]:
        raise NotImplementedError


class Workers(Children):
    """Workers of the database in the settings."""

    kind = "worker"

    def _start(self) -> subprocess.Popen[bytes]:
        return start_worker()


class Servers(Children):
    """Servers, which accept from one socket: if one dies, the others accept its connections."""

    kind = "server"

    def __init__(self, count: int, listener: socket.socket) -> None:
        super().__init__(count)
        self._listener = listener

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        from service.http.server.draining import drop_new_connections

        # All servers end together; a single one must not keep the others from accepting.
        drop_new_connections(self._listener.fileno())
        super().__exit__(kind, value, trace)

    def _start(self) -> subprocess.Popen[bytes]:
        number = self._listener.fileno()
        return _start("serve", {LISTENING: str(number)}, (number,))


def start_worker() -> subprocess.Popen[bytes]:
    """Start a worker of the database in this process's settings."""
    return _start("worker", {})


def _start(name: str, more: Mapping[str, str], kept: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Run a `regraft` command in a process that inherits these file descriptors and stops when this one ends."""
    # -P: import nothing from the working directory, which may have another `service` or `index`.
    command = [sys.executable, "-P", "-m", "regraft", name]
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    # A separate session: Ctrl-C only reaches the service, which then ends its workers in order.
    environment = {**os.environ, "PYTHONPATH": paths, FOLLOW_PARENT: "1", **more}
    return subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, env=environment, start_new_session=True, pass_fds=kept
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def terminate_with_parent() -> None:
    """Send this process SIGTERM once its parent, which holds the other end of standard input, has ended."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    while True:  # repeated, because a server that does not serve yet would ignore it
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(RESTART_PAUSE_SECONDS)


def stop_with_parent(stop: threading.Event) -> None:
    """Set `stop` once the parent has ended."""
    # Not through `sys.stdin`: the interpreter cannot exit while a thread waits in its buffer.
    while os.read(sys.stdin.fileno(), 1):
        pass
    stop.set()
