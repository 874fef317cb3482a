"""TCP ports for processes that a test starts, and may start again on the same port."""

from __future__ import annotations

import socket

_kept: list[socket.socket] = []


def free_port() -> int:
    """A free port that no other process is given while this one lives, because tests run in parallel.

    The socket stays bound without listening. A server can still bind the port, because both set SO_REUSEADDR (servers
    of asyncio and uvloop do); the system does not give it to processes that ask for any port.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    _kept.append(kept)
    return int(kept.getsockname()[1])
