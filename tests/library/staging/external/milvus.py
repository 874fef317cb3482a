"""Milvus's test server (milvus-lite), as a process that a test may freeze, kill and restart on its data."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

from examples.demo.engines import LITE
from staging.processes.forked import ROOT, environment
from staging.waiting import until


class MilvusTestServer:
    """See the module. Listens on 127.0.0.1 only; `token` is empty, because it has no users."""

    token = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, first on any free port, later on the same one."""
        first = self._process is None
        while not self._started():
            assert first, self._log.read_text()
            self._port = _free_port()

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it, by default with SIGKILL."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(how)
        self._process.wait()

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _started(self) -> bool:
        """Start a process; False: it ended, as it does if the port is in use."""
        self._folder.mkdir(exist_ok=True)
        data, port = self._folder / "data", str(self._port)
        command: list[str | Path] = [sys.executable, "-c", LITE, "server", "--data-dir", data, "--host", "127.0.0.1"]
        with self._log.open("ab") as log:
            self._process = process = subprocess.Popen(
                [*command, "--port", port], env=environment(), cwd=ROOT, stdout=log, stderr=log
            )
        until(lambda: process.poll() is not None or _listens(self._port))
        return process.poll() is None


def _free_port() -> int:
    # Not staging.processes.ports, which keeps the port bound: gRPC cannot start a server on it.
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
