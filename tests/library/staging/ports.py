"""TCP ports for processes that a test starts, and may start again on the same port."""

from __future__ import annotations

import socket

_kept: list[socket.socket] = []


def free_port() -> int:
    """A free port that nobody else is given while this process lives: tests run beside each other.

    The socket stays bound and does not listen. A server may bind the port all the same, because both set SO_REUSEADDR
    (servers of asyncio and uvloop do); the system does not hand it to whoever asks for any port.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    _kept.append(kept)
    return int(kept.getsockname()[1])
