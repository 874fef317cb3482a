"""Graceful shutdown without lost requests: `Server` tells its clients, then stops listening, then ends.

A request is lost if the server closes its connection while it is in transit. So for a moment every response closes its
connection (`Connection: close`), and clients open a new one, or go elsewhere, since readiness is `draining`. Only then
no more connections are accepted. Connections that stay idle are closed last.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from index.events import Event

if TYPE_CHECKING:
    from uvicorn.server import Protocols

GRACE_SECONDS = 10
"""How long requests may take to end after the server is asked to stop; includes the next three."""
DRAIN_SECONDS = 2.0
"""How long new connections are accepted at most, while clients still open them."""
QUIET_SECONDS = 0.2
"""After so long without activity, every client has been told."""
LAST_SECONDS = 1.0
"""How long the newest connections may take to send their request."""
CHECK_SECONDS = 0.02
STUCK_SECONDS = 20.0
"""When the process ends at the latest, whatever is still running."""
STUCK = 4
"""Exit code in that case; nothing acknowledged is lost."""

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Serves `app` until it is asked to stop, then shuts down as described above."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        *,
        shared: bool = False,
        listening: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`shared`: other processes accept from the same socket and may continue; `listening`: called with the port."""
        super().__init__(config)
        self._app, self._shared = app, shared
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._listening(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        last = threading.Timer(STUCK_SECONDS, _exit_now)
        last.daemon = True
        last.start()
        # Streams end, and readiness answers `draining`.
        if (runtime := getattr(self._app.state, "runtime", None)) is not None:
            runtime.stopping.set()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        began = time.monotonic()
        self._announce_close()
        await self._until_quiet()
        await self._stop_listening()
        left = GRACE_SECONDS - (time.monotonic() - began)
        self.config.timeout_graceful_shutdown = max(1, math.ceil(left))
        await super().shutdown(sockets)

    def _announce_close(self) -> None:
        """From now on, make each response the last of its connection."""
        # Uvicorn adds these headers to every response, and closes the connection after one with `close`.
        state = self.server_state
        state.default_headers = [*state.default_headers, (b"connection", b"close")]
        for connection in state.connections:
            if _is_answering(connection):
                connection.shutdown()

    async def _until_quiet(self) -> None:
        def activity() -> tuple[int, frozenset[Protocols]]:
            return self.server_state.total_requests, frozenset(self.server_state.connections)

        last, since = activity(), time.monotonic()

        def is_quiet() -> bool:
            nonlocal last, since
            if (now := activity()) != last:
                last, since = now, time.monotonic()
            return time.monotonic() - since > QUIET_SECONDS

        await self._wait(is_quiet, DRAIN_SECONDS)

    async def _stop_listening(self) -> None:
        """Close the listening sockets when no connection waits in them, and let the newest ones send a request."""
        listening = [listener.fileno() for server in self.servers for listener in server.sockets]
        if not self._shared:
            waiting = select.poll()  # not `select`, which knows no more than 1,024 descriptors
            for descriptor in listening:
                drop_new_connections(descriptor)
                waiting.register(descriptor, select.POLLIN)
            await self._wait(lambda: not waiting.poll(0), LAST_SECONDS)
        for server in self.servers:
            server.close()
        await self._wait(
            lambda: all(_has_request(connection) for connection in self.server_state.connections), LAST_SECONDS
        )

    async def _wait(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait until `holds` is true twice in a row, the time is over, or the user forces an exit."""
        until, before = time.monotonic() + seconds, False
        while not self.force_exit and time.monotonic() < until:
            now = holds()
            if now and before:
                return
            before = now
            await asyncio.sleep(CHECK_SECONDS)


def _exit_now() -> None:
    """End this process, whatever its threads do, since a run of onnxruntime cannot be interrupted."""
    logger.error(Event("ended_without_waiting", seconds=STUCK_SECONDS))
    os._exit(STUCK)


def _is_answering(connection: Protocols) -> bool:
    cycle = getattr(connection, "cycle", None)
    return cycle is not None and not cycle.response_complete


def _has_request(connection: Protocols) -> bool:
    return getattr(connection, "cycle", None) is not None


SO_ATTACH_FILTER = 26
DROP_SYN = (
    (0x30, 0, 0, 13),  # load the byte of the TCP flags
    (0x45, 0, 1, 0x02),  # is SYN among them?
    (0x06, 0, 0, 0),  # then drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # else keep it whole
)
"""A program of the classic packet filter, see socket(7) and <linux/filter.h>."""


def drop_new_connections(number: int) -> None:
    """Make the kernel accept no new connection on a listening socket; only on Linux.

    Closing the socket would reset connections made since the last check. A client whose first packet is dropped repeats
    it after a second, and is then refused.
    """
    if sys.platform != "linux":
        return
    program = b"".join(struct.pack("HBBI", *step) for step in DROP_SYN)
    steps = ctypes.create_string_buffer(program)
    option = struct.pack("HP", len(DROP_SYN), ctypes.addressof(steps))
    with socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as listener, suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, option)
