"""HTTP by uvicorn, with head and body of an answer in one system call, where uvicorn makes two."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class WholeAnswers(HttpToolsProtocol):
    """Uvicorn's protocol; it writes the head of an answer as soon as it is known, and then the body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer on a new connection."""
        super().connection_made(cast("asyncio.Transport", PairedWrites(transport, self.loop)))


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
        """Send it after what is held, or hold it."""
        if self._held is not None:
            held, self._held = self._held, None
            self._transport.writelines((held, data))
            return
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
        if self._held is not None:
            held, self._held = self._held, None
            self._transport.write(held)
