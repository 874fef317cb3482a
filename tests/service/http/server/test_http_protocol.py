"""The protocol of connections: the head of an answer waits for its body, and nothing for a client that says no more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from service.http.server import http_protocol
from service.http.server.http_protocol import HttpProtocol, PairedWrites


class Transport:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.done.append(b"+".join(parts))

    def close(self) -> None:
        self.done.append("closed")

    def is_closing(self) -> bool:
        return "closed" in self.done


@pytest.mark.parametrize(
    ("steps", "done"),
    [
        (["head", "body", "pass"], [b"head+body"]),
        (["head", "pass", "body", "pass"], [b"head", b"body"]),  # a stream whose first part comes later
        (["head", "body", "more", "pass"], [b"head+body", b"more"]),
        (["head", "body", "head", "body", "pass"], [b"head+body", b"head+body"]),
        (["head", "close", "pass"], [b"head", "closed"]),
        (["head", "", "pass"], [b"head"]),  # 204
        (["close"], ["closed"]),
        (["gone", "head", "body", "pass"], ["closed"]),
        (["head", "gone", "body", "pass"], ["closed"]),
        (["head", "gone", "pass"], ["closed"]),
    ],
)
def test_head_and_body_are_written_together_in_their_order_and_nothing_is_kept_or_sent_to_nobody(
    steps: list[str], done: list[Any]
) -> None:
    async def run() -> list[Any]:
        transport = Transport()
        writes = PairedWrites(transport, asyncio.get_running_loop())
        for step in steps:
            if step == "pass":
                await asyncio.sleep(0)
            elif step == "close":
                writes.close()
            elif step == "gone":
                transport.close()
            else:
                writes.write(step.encode())
        assert writes.is_closing() == ("closed" in done)
        return transport.done

    assert asyncio.run(run()) == done


@pytest.mark.parametrize("to", [b"h2c", b"websocket"])
@pytest.mark.parametrize("cut", [0, 30, 95, 130])
def test_a_request_that_asks_for_another_protocol_is_answered_in_this_one(to: bytes, cut: int) -> None:
    """As Java's client does with every request; its body is not dropped, nor read as a request."""
    body = b"DELETE /b HTTP/1.1\r\nHost: here\r\n\r\n"
    asks = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMA\r\n" % to
    first = b"POST /a HTTP/1.1\r\nHost: here\r\n%bContent-Length: %d\r\n\r\n%b" % (asks, len(body), body)
    last = b"GET /c HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        read, more = b"", True
        while more:
            message = await receive()
            read, more = read + message.get("body", b""), message.get("more_body", False)
        seen.append((scope["type"], scope["method"], scope["path"], read))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    whole = first + first + last
    answer = talk(app, [whole[:cut], whole[cut:]] if cut else [whole], 0.05)

    posted = ("http", "POST", "/a", body)
    assert seen == [posted, posted, ("http", "GET", "/c", b"")]
    assert answer.count(b"HTTP/1.1 204") == 3


def test_a_tunnel_is_refused() -> None:
    assert b" 400 " in talk(None, [b"CONNECT here:1 HTTP/1.1\r\nHost: here\r\n\r\n"], 0.05)


def talk(app: Any, sent: Sequence[bytes], pause: float) -> bytes:
    """What a server answers to parts of a request that come one after the other."""

    async def run() -> bytes:
        config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_keep_alive=0)
        loop, state = asyncio.get_running_loop(), ServerState()
        async with await loop.create_server(lambda: HttpProtocol(config, state, {}), "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for part in sent:
                writer.write(part)
                await asyncio.sleep(pause)
            answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            await asyncio.gather(*state.tasks)
        return answer

    return asyncio.run(run())


HEAD = b"POST / HTTP/1.1\r\nHost: here\r\n"
PART = HEAD + b"Content-Length: 9\r\n\r\n{"
WHOLE = HEAD + b"Content-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([], b""),
        ([HEAD], b""),
        ([HEAD[:9], HEAD[9:25], HEAD[25:]], b""),  # a head comes in one go
        ([PART], b""),
        ([PART, *[b"x"] * 8], b"204"),
        ([WHOLE], b"204"),  # it is the service that takes its time
        ([PART[:-5] + b"\r\nExpect: 100-continue\r\n\r\n"], b"100"),  # and here first the service, then the client
    ],
)
def test_who_owes_the_rest_of_a_request_is_waited_for_a_while_and_no_longer(
    sent: list[bytes], status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "CHECK_SECONDS", 0.1)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.6)
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    assert talk(slow, sent, 0.12).split()[1:2] == [status][: len(status)]


@pytest.mark.parametrize(("reads", "left"), [(False, False), (True, True)])
def test_an_answer_of_which_nothing_is_read_is_given_up(
    reads: bool, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(http_protocol, "MAX_UNREAD_CHECKS", 6)
    answer = b"x" * (64 << 20)

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    async def run() -> bool:
        config = uvicorn.Config(large, lifespan="off", log_config=None)
        loop, state = asyncio.get_running_loop(), ServerState()
        async with await loop.create_server(lambda: HttpProtocol(config, state, {}), "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1 << 20)
            writer.write(WHOLE)
            for _ in range(15):
                await asyncio.sleep(0.05)
                if reads:
                    await reader.readexactly(2 << 20)
            served = bool(state.connections)
            writer.transport.abort()
        return served

    assert asyncio.run(run()) == left


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([b"GET /?", *[b"a" * 60] * 3], b"400"),
        ([HEAD, b"X: ", *[b"a" * 60] * 3], b"400"),
        ([HEAD, *[b"X: a\r\n" * 10] * 3], b"400"),
        ([CHUNKED, b"0\r\n", *[b"X: a\r\n" * 10] * 3], b"400"),
        ([HEAD + b"X: " + b"a" * 60, b"a" * 60, b"\r\nContent-Length: 300\r\n\r\n", *[b"x" * 100] * 3], b"204"),
        ([CHUNKED, *[b"3C\r\n" + b"x" * 60 + b"\r\n"] * 3, b"0\r\n\r\n"], b"204"),
    ],
)
def test_a_head_or_trailers_without_an_end_are_not_kept_and_a_body_is_no_part_of_them(
    sent: list[bytes], status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_HEAD_BYTES", 150)

    async def read(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.request":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

    assert talk(read, sent, 0.02).split()[1] == status
