"""Clients that query without a pause, over raw connections: a client's library would take longer than the search."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any


def request(url: str, path: str, content: bytes, kind: str) -> bytes:
    media, _, params = kind.partition("?")
    head = f"POST {path}{'?' if params else ''}{params} HTTP/1.1\r\nhost: {url.removeprefix('http://')}\r\n"
    return f"{head}content-type: {media}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def host_and_port(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def is_whole(answer: bytes) -> bool:
    """Whether all of an answer of HTTP is there."""
    head, separator, rest = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return bool(separator) and len(rest) >= int(length)


async def load(url: str, asks: Sequence[bytes], connections: int, seconds: float) -> list[float]:
    host, port = host_and_port(url)
    took: list[float] = []
    ended = time.perf_counter() + seconds
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: Client(asks, ended, took), host, port))[1] for _ in range(connections)
    ]
    await asyncio.gather(*(client.done for client in clients))
    return took


async def beside(url: str, asks: Sequence[bytes], connections: int, other: bytes, seconds: float) -> list[float]:
    """How long another request takes beside so many connections that ask."""
    loads = [load(url, asks, connections, seconds)] if connections else []
    took, *_ = await asyncio.gather(load(url, [other], 1, seconds), *loads)
    return took


class Client(asyncio.Protocol):
    """Asks, reads the answer, asks again."""

    def __init__(self, asks: Sequence[bytes], ended: float, took: list[float]) -> None:
        self._asks, self._ended, self._took = asks, ended, took
        self._number, self._data = 0, b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not is_whole(self._data):
            return
        if not self._data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(self._data.decode()))
            return
        now = time.perf_counter()
        self._took.append(now - self._started)
        if now < self._ended:
            self._ask()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _ask(self) -> None:
        self._data, self._number = b"", (self._number + 1) % len(self._asks)
        self._started = time.perf_counter()
        self._transport.write(self._asks[self._number])
