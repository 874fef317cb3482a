"""Uvicorn's HTTP protocol, with head and body of an answer sent in one system call, where uvicorn makes two.

It also closes connections whose client owes the rest of a request, or reads nothing of an answer: uvicorn waits without
limit, and each connection keeps a descriptor and the answer. And it refuses a head that is too long, before any key is
checked: uvicorn keeps one of any length.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CHECK_SECONDS = 10.0
MAX_OWED_CHECKS = 4
"""Checks in a row at which a client may owe the same head of a request, or the next part of its body."""
MAX_UNREAD_CHECKS = 30
"""Checks in a row at which it may have read nothing more of an answer: the system reports a large buffer late."""
MAX_HEAD_BYTES = 1 << 17
"""Bytes of a head, or of trailers after a body, beside what came with their first bytes."""


class HttpProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with the limits above, over a transport that joins head and body of an answer."""

    # Checks are counted and not seconds: no client is closed for a while in which this process read nothing.
    _owed_checks = 0
    _unread_checks = 0
    _unread_bytes = 0
    _head_bytes = 0
    _next_check: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to check a new connection."""
        super().connection_made(cast("asyncio.Transport", PairedWrites(transport, self.loop)))
        self._next_check = self.loop.call_later(CHECK_SECONDS, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop checking it."""
        self._next_check.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what came, but no head or trailers without an end."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"The request headers are longer than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """Read the first bytes of a request."""
        self._owed_checks = self._head_bytes = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Read the next bytes of its body."""
        self._owed_checks = self._head_bytes = 0
        super().on_body(body)

    def _check(self) -> None:
        self._owed_checks = self._owed_checks + 1 if self._is_clients_turn() else 0
        before, self._unread_bytes = self._unread_bytes, self.transport.get_write_buffer_size()
        self._unread_checks = self._unread_checks + 1 if 0 < before == self._unread_bytes else 0
        if self._owed_checks == MAX_OWED_CHECKS:
            self.transport.close()
        if self._unread_checks == MAX_UNREAD_CHECKS:
            self.transport.abort()  # a connection that is closed still waits for it to be read
        self._next_check = self.loop.call_later(CHECK_SECONDS, self._check)

    def _is_clients_turn(self) -> bool:
        """Whether the client has to send next. Between two requests it may be idle as long as uvicorn allows."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return self.timeout_keep_alive_task is None
        return cycle.more_body and not cycle.waiting_for_100_continue and not self.flow.read_paused


class PairedWrites:
    """A transport that delays one write until the next, but no longer than this pass of the event loop."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self.is_closing = transport.is_closing  # called for each answer
        self._delayed: bytes | None = None
        self._will_flush = False

    def __getattr__(self, name: str) -> Any:
        """Everything else is the transport's own."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send it after the delayed write, or delay it; drop it where the client is gone.

        Uvicorn tells only the last of several pipelined requests that their client left.
        """
        if self.is_closing():
            self._delayed = None
        elif not data:
            return  # Python 3.12 and later try for ever to send an empty part of `writelines`
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
