"""Uvicorn's HTTP protocol, with limits, and with the head and body of a response in one system call instead of two.

It closes connections whose client does not send the rest of a request, or does not read a response: uvicorn would wait
without limit, and each connection holds a descriptor and the response. It refuses too long heads of requests, before
any key is checked: uvicorn has no limit. It answers requests that ask for another protocol (`Upgrade`) in this one.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CHECK_SECONDS = 10.0
MAX_OWED_CHECKS = 4
"""Checks in a row at which a client may owe the same head of a request, or the next part of its body."""
MAX_UNREAD_CHECKS = 30
"""Checks in a row at which a client may have read nothing of a response; the system reports a large buffer late."""
MAX_HEAD_BYTES = 1 << 17
"""Most bytes of a head, or of trailers after a body, without those received together with its beginning."""


class HttpProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with the limits above, over a transport that joins head and body of a response."""

    # Counts checks instead of seconds, so that no connection is closed because this process did not read for a while.
    _owed_checks = 0
    _unread_checks = 0
    _unread_bytes = 0
    _head_bytes = 0
    _upgrade: BaseException | None = None
    _next_check: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to check a new connection."""
        super().connection_made(cast("asyncio.Transport", PairedWrites(transport, self.loop)))
        self._next_check = self.loop.call_later(CHECK_SECONDS, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop checking the connection, and tell the request that has no answer yet."""
        self._next_check.cancel()
        super().connection_lost(exc)
        if self.cycle is not None and self.cycle.disconnected:
            exchange = self.cycle.scope["state"].get("exchange")  # service.http.server.auth.Exchange
            if exchange is not None:
                exchange.disconnected()

    def data_received(self, data: bytes) -> None:
        """Read the received bytes, with a limit for heads and trailers."""
        self._head_bytes += len(data)
        while True:
            super().data_received(data)
            if self._upgrade is None:
                break
            data, self._upgrade = self._without_upgrade(data), None
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The request headers are longer than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """Read the first bytes of a request."""
        self._owed_checks = self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin to answer, unless the head asks for another protocol: then it is read once more, without that."""
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Read the end of a request."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _should_upgrade(self) -> bool:
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Note where the parser stopped, at the end of a head that asks for another protocol.

        Java's client asks for HTTP/2 with every request. uvicorn would drop the body, or read it as the next request.
        """
        self._upgrade = sys.exc_info()[1]

    def _without_upgrade(self, data: bytes) -> bytes:
        """The head again, without `Upgrade`, and what follows it in `data`; for a new parser."""
        assert self._upgrade is not None
        rest, method = data[self._upgrade.args[0] :], self.parser.get_method()
        self.parser = httptools.HttpRequestParser(self)
        if method == b"CONNECT":  # the head of no request that is answered here
            return b"CONNECT\r\n"
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, self.url, b"".join(lines), rest)

    def on_body(self, body: bytes) -> None:
        """Read the next bytes of a request's body."""
        self._owed_checks = self._head_bytes = 0
        super().on_body(body)

    def _check(self) -> None:
        self._owed_checks = self._owed_checks + 1 if self._is_clients_turn() else 0
        before, self._unread_bytes = self._unread_bytes, self.transport.get_write_buffer_size()
        self._unread_checks = self._unread_checks + 1 if 0 < before == self._unread_bytes else 0
        if self._owed_checks == MAX_OWED_CHECKS:
            self.transport.close()
        if self._unread_checks == MAX_UNREAD_CHECKS:
            self.transport.abort()  # `close` would still wait for the client to read
        self._next_check = self.loop.call_later(CHECK_SECONDS, self._check)

    def _is_clients_turn(self) -> bool:
        """Whether the client has to send next; between two requests it may be idle as long as uvicorn permits."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return self.timeout_keep_alive_task is None
        return cycle.more_body and not cycle.waiting_for_100_continue and not self.flow.read_paused


class PairedWrites:
    """A transport that delays a write until the next one, but at most to the end of this pass of the event loop."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self.is_closing = transport.is_closing  # called for each response
        self._delayed: bytes | None = None
        self._will_flush = False

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else to the transport."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send `data` with the delayed write, or delay it; drop it if the client has disconnected.

        Of several pipelined requests, uvicorn notifies only the last that the client has disconnected.
        """
        if self.is_closing():
            self._delayed = None
        elif not data:
            return  # Python 3.12 and later try forever to send an empty part of `writelines`
        elif self._delayed is not None:
            delayed, self._delayed = self._delayed, None
            self._transport.writelines((delayed, data))
        else:
            self._delayed = data
            if not self._will_flush:
                self._will_flush = True
                self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Send the delayed write, and close."""
        self._send()
        self._transport.close()

    def _flush(self) -> None:
        self._will_flush = False
        self._send()

    def _send(self) -> None:
        delayed, self._delayed = self._delayed, None
        if delayed is not None and not self.is_closing():
            self._transport.write(delayed)
