"""`Processes`: the real service and real workers as separate processes that can be killed and restarted."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Self

from regraft import Client, Problem, Unreachable

NONE: Mapping[str, str] = MappingProxyType({})
READY_SECONDS = 60.0
STOP_SECONDS = 10.0
LEASE_SECONDS = 2.0
"""Seconds for which the chunk of a killed worker stays claimed; short, so that the demo does not wait."""


class Processes:
    """One service and one worker over one data folder, on a free loopback port that stays the same.

    The context manager starts and ends both; their output goes to service.log, worker.log and remote.log in the folder.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str] = NONE) -> None:
        """`settings`: further settings of the service."""
        self._settings = settings
        self.data = folder / "data"
        self.elsewhere = folder / "elsewhere"
        self.logs = {name: folder / f"{name}.log" for name in ("service", "worker", "remote")}
        self.api_key, self.worker_key = secrets.token_urlsafe(), secrets.token_urlsafe()
        self.port = free_port()
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

    def client(self, key: str | None = None) -> Client:
        """A client with this key; by default with the key for everything."""
        return Client(self.url, key or self.api_key)

    def start(self) -> None:
        """Start both and wait until the service is ready.

        Raises:
            RuntimeError: a process ended, or the service was not ready in time; with the end of its log.
        """
        mine = {"REGRAFT_DATA": str(self.data), "REGRAFT_LEASE_SECONDS": str(LEASE_SECONDS)}
        keys = {"REGRAFT_API_KEY": self.api_key, "REGRAFT_WORKER_KEY": self.worker_key}
        listen = ("--host", "127.0.0.1", "--port", str(self.port))
        self._launch("service", mine | keys | dict(self._settings), "serve", *listen, "--workers", "0")
        with self.client() as client:
            self._wait_ready(client)
        self._launch("worker", mine, "worker")

    def start_remote(self) -> None:
        """End the local worker and start a remote one, which only has the service's URL and the worker key."""
        self.end("worker")
        keys = {"REGRAFT_WORKER_KEY": self.worker_key}
        self._launch("remote", keys, "worker", "--url", self.url, "--data", str(self.elsewhere))

    def running(self) -> list[str]:
        """The names of the running processes."""
        return sorted(self._running)

    def remotely_moved(self) -> int:
        """Number of items that the service accepted from the remote worker, by the worker's log."""
        lines = self.logs["remote"].read_text(errors="replace").splitlines()
        return sum(int(found[1]) for line in lines if (found := re.search(r"action=chunk_done .* done=(\d+)", line)))

    def kill(self) -> None:
        """Kill both with SIGKILL, like a power cut."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        self._running.clear()

    def stop(self) -> None:
        """End all processes with SIGTERM."""
        for process in self._running.values():
            process.terminate()
        for name in self.running():
            self.end(name)

    def end(self, name: str) -> None:
        """End one process with SIGTERM; a worker finishes its chunk."""
        process = self._running.pop(name)
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def check(self) -> None:
        """Raise RuntimeError, with the end of its log, if a process has ended by itself."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise RuntimeError(f"the {name} ended with code {process.returncode}:\n{self._log_end(name)}")

    def _launch(self, name: str, settings: Mapping[str, str], *command: str) -> None:
        # Settings of the caller's own service must not leak into this one.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("REGRAFT_")}
        with self.logs[name].open("ab") as log:
            self._running[name] = _popen([sys.executable, "-m", "regraft", *command], {**environment, **settings}, log)

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


def free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
