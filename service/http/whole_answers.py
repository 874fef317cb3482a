"""HTTP by uvicorn, with head and body of an answer in one system call, where uvicorn makes two.

And with an end to connections whose client owes the rest of a request, or reads nothing of an answer: uvicorn waits as
long as it takes, and each keeps a descriptor and the answer; it keeps a head of any length, too, before anybody is
asked for a key.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LOOK_SECONDS = 10.0
LOOKS = 4
"""So often in a row a client may be found owing the same head of a request, or the next part of its body."""
UNREAD_LOOKS = 30
"""So often, having read nothing of the rest of an answer; longer, for of a large buffer the system tells late."""
HEAD_BYTES = 1 << 17
"""How long a head may be, or the trailers behind a body, beside what came with their beginning."""


class WholeAnswers(HttpToolsProtocol):
    """Uvicorn's protocol; it writes the head of an answer as soon as it is known, and then the body."""

    # Looks are counted and no seconds, so that nobody is blamed for a while in which nothing was read here.
    _owed = 0
    _unread = 0
    _unread_bytes = 0
    _head_bytes = 0
    _looking: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer on a new connection."""
        super().connection_made(cast("asyncio.Transport", PairedWrites(transport, self.loop)))
        self._looking = self.loop.call_later(LOOK_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._looking.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what came, but no head or trailers without an end."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > HEAD_BYTES:
            self.send_400_response(f"The head of the request is longer than {HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """Read the first bytes of a request."""
        self._owed = self._head_bytes = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Read the next bytes of its body."""
        self._owed = self._head_bytes = 0
        super().on_body(body)

    def _look(self) -> None:
        self._owed = self._owed + 1 if self._waits() else 0
        before, self._unread_bytes = self._unread_bytes, self.transport.get_write_buffer_size()
        self._unread = self._unread + 1 if 0 < before == self._unread_bytes else 0
        if self._owed == LOOKS:
            self.transport.close()
        if self._unread == UNREAD_LOOKS:
            self.transport.abort()  # a connection that is closed still waits for it to be read
        self._looking = self.loop.call_later(LOOK_SECONDS, self._look)

    def _waits(self) -> bool:
        """Whether it is the client's turn. Between two requests it may rest as long as uvicorn lets it."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return self.timeout_keep_alive_task is None
        return cycle.more_body and not cycle.waiting_for_100_continue and not self.flow.read_paused


class PairedWrites:
    """A transport that holds one write back until the next, but no longer than this pass of the event loop."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self.is_closing = transport.is_closing  # asked for each answer
        self._held: bytes | None = None
        self._will_flush = False

    def __getattr__(self, name: str) -> Any:
        """All else is the transport's own."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send it after what is held, or hold it; to nobody where the client is gone.

        Of several requests that came at once uvicorn tells only the last that their client left.
        """
        if self.is_closing():
            self._held = None
        elif not data:
            return  # Python 3.12 and later try for ever to send an empty part of `writelines`
        elif self._held is not None:
            held, self._held = self._held, None
            self._transport.writelines((held, data))
        else:
            self._held = data
            if not self._will_flush:
                self._will_flush = True
                self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Send what is held, and close."""
        self._send()
        self._transport.close()

    def _flush(self) -> None:
        self._will_flush = False
        self._send()

    def _send(self) -> None:
        held, self._held = self._held, None
        if held is not None and not self.is_closing():
            self._transport.write(held)
