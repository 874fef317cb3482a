"""The real service and a real worker, as processes of their own that can be killed and started again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from regraft import Client, Problem, Unreachable

READY_SECONDS = 60.0
STOP_SECONDS = 10.0
LEASE_SECONDS = 2.0
"""How long a killed worker's chunk stays claimed; short, so that the demo need not wait."""


class Processes:
    """One service and one worker over one data folder, on a free loopback port that stays the same.

    The context starts both and ends both; their output goes to service.log and worker.log in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.logs = {name: folder / f"{name}.log" for name in ("service", "worker")}
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start both and wait until the service says it is ready.

        Raises:
            RuntimeError: a process ended, or the service was not ready in time; with the end of its log.
        """
        self._launch("service", "serve", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "0")
        with Client(self.url) as client:
            self._wait_ready(client)
        self._launch("worker", "worker")

    def kill(self) -> None:
        """Kill -9 both, as a power cut would."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        self._running.clear()

    def stop(self) -> None:
        """End both in order."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def check(self) -> None:
        """Raise RuntimeError, with the end of its log, when a process has ended by itself."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise RuntimeError(f"the {name} ended with code {process.returncode}:\n{self._log_end(name)}")

    def _launch(self, name: str, *command: str) -> None:
        # Settings of the caller's own service must not leak into this one.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("REGRAFT_")}
        environment |= {"REGRAFT_DATA": str(self.data), "REGRAFT_LEASE_SECONDS": str(LEASE_SECONDS)}
        with self.logs[name].open("ab") as log:
            self._running[name] = _popen([sys.executable, "-m", "regraft", *command], environment, log)

    def _wait_ready(self, client: Client) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            self.check()
            try:
                client.ready()
            except (Unreachable, Problem) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the service is not ready: {error}\n{self._log_end('service')}") from error
                time.sleep(0.05)
            else:
                return

    def _log_end(self, name: str, lines: int = 20) -> str:
        return "\n".join(self.logs[name].read_text(errors="replace").splitlines()[-lines:])


def _popen(command: list[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C reaches the demo only, which then ends its processes in order.
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
