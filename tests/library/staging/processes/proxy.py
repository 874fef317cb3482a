"""`Proxy`: a load balancer of several services: round robin, skipping services that refuse connections.

Each request opens a new connection. If it fails, the next service is tried, because nothing was sent; a request that
was sent but not answered is answered with 502 and never sent twice.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from staging.processes.forked import Forked

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "date", "server"}
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 60.0


class Proxy(ThreadingHTTPServer):
    """Listens on a free port of this machine; `services`: the ports of the services."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, services: Sequence[int]) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.turn = itertools.cycle(range(len(services)))
        self.services = services
        self.lost: list[str] = []
        """Requests that a service received but did not answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def kill(self, service: Forked) -> int:
        """Kill a service; returns how many requests are lost, once it is dead. Each client may lose one more.

        While it dies, its listening socket may be the last one that is closed, so a client may lose several.
        """
        service.kill()
        service.wait()
        return len(self.lost)

    def connected(self) -> HTTPConnection:
        """A connection to the next service that accepts one. Raises OSError if none does."""
        first = next(self.turn)
        for step in range(len(self.services)):
            port = self.services[(first + step) % len(self.services)]
            connection = HTTPConnection("127.0.0.1", port, timeout=CONNECT_SECONDS)
            try:
                connection.connect()
            except OSError:
                connection.close()
            else:
                connection.sock.settimeout(ANSWER_SECONDS)
                return connection
        raise ConnectionRefusedError("no service takes a connection")


class _Forward(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        try:
            connection = self.server.connected()
        except OSError as error:
            self._say(503, [], str(error).encode())
            return
        headers["Host"] = f"127.0.0.1:{connection.port}"
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, HTTPException) as error:
            self.server.lost.append(f"{self.command} {self.path}: {error!r}")
            self._say(502, [], repr(error).encode())
        else:
            self._say(answer.status, answer.getheaders(), content)
        finally:
            connection.close()

    def _say(self, status: int, headers: Sequence[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in {*HOP_BY_HOP, "content-length"}:
                self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


@contextmanager
def proxied(services: Sequence[int]) -> Iterator[Proxy]:
    """A proxy that runs until the end of the block."""
    proxy = Proxy(services)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
