"""The asynchronous client against a real server: whatever the other one does, with many requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

import numpy as np
import pytest

from regraft import AsyncClient, Client, ImageItem, Problem, Unreachable, connection

RANDOM = np.random.default_rng(0)
VECTORS = RANDOM.normal(size=(60, 4)).astype(np.float32)


def ask(served: Any, task: Callable[[AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    """What a task comes to that is given a client."""

    async def within() -> Any:
        async with AsyncClient(served.url, **options) as client:
            return await task(client)

    return asyncio.run(within())


def test_a_gallery_is_filled_asked_and_upgraded(served: Any, pictures: list[bytes]) -> None:
    async def live(client: AsyncClient) -> Any:
        await client.create_gallery("life")
        await client.deploy("life", "v1")
        stored = await client.ingest("life", [ImageItem(f"i{n}", one) for n, one in enumerate(pictures)])
        before = await client.query("life", pictures[:3], k=1)
        await client.deploy("life", "v2")
        across = await client.query("life", pictures[:3], k=1)
        started = await client.start_backfill("life")
        working = asyncio.create_task(asyncio.to_thread(served.work))
        told = [progress async for progress in client.watch_backfill(started.id)]
        await working
        found = [[match.id for match in one.matches] for one in (*before.results, *across.results)]
        return stored.stored, found, told[-1].state, (await client.gallery("life")).mix

    stored, found, state, mix = ask(served, live)

    assert (stored, found) == (len(pictures), [["i0"], ["i1"], ["i2"]] * 2)
    assert (state, mix) == ("done", {"v2": len(pictures)})


def test_a_folder_is_packed_and_sent(served: Any) -> None:
    version = served.add("sent-twice", 4)

    assert ask(served, lambda client: client.register_version(version.folder)).name == "sent-twice"


def test_many_requests_at_once_are_answered_each_with_its_own(served: Any) -> None:
    name = served.gallery("v1").rpartition("/")[2]
    count = 300

    async def gather(client: AsyncClient) -> Any:
        await client.ingest_embeddings(name, [{"id": str(n), "embedding": row} for n, row in enumerate(VECTORS)])
        asked = [client.query_embeddings(name, VECTORS[n % 60][None], "v1", k=1) for n in range(count)]
        return await asyncio.gather(*asked)

    answers = ask(served, gather)

    assert [one.results[0].matches[0].id for one in answers] == [str(n % 60) for n in range(count)]


def test_requests_that_are_cancelled_leave_the_client_usable(served: Any) -> None:
    async def cancel(client: AsyncClient) -> Any:
        asked = [asyncio.create_task(client.galleries()) for _ in range(150)]
        await asyncio.sleep(0.01)
        for one in asked[::2]:
            one.cancel()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        return ended, await client.health()

    ended, health = ask(served, cancel)

    assert not [one for one in ended if isinstance(one, Exception)]
    assert health.status == "ok"


def test_a_watch_that_is_left_early_closes_its_stream(served: Any, pictures: list[bytes], alone: None) -> None:
    number = served.backfill(served.filled(pictures, "v1", "v2"))

    async def leave(client: AsyncClient) -> Any:
        async with aclosing(client.watch_backfill(number)) as told:
            first = await anext(told)
        transport: Any = client._http._transport
        return first.id, transport._pool.connections

    assert ask(served, leave) == (number, [])
    with Client(served.url) as client:
        told = client.watch_backfill(number)
        assert next(told).id == number
        told.close()
        transport: Any = client._http._transport
        assert transport._pool.connections == []


def test_what_is_watched_holds_up_no_request(
    served: Any, pictures: list[bytes], alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_REQUESTS", 2)
    number = served.backfill(served.filled(pictures, "v1", "v2"))

    async def watch(client: AsyncClient) -> Any:
        async with AsyncExitStack() as streams:
            for _ in range(4):
                await anext(await streams.enter_async_context(aclosing(client.watch_backfill(number))))
            return await asyncio.wait_for(asyncio.gather(*(client.health() for _ in range(9))), 10)

    assert [one.status for one in ask(served, watch)] == ["ok"] * 9


def test_what_is_refused_or_not_there_is_the_same_error_as_of_the_other_client(served: Any) -> None:
    url = served.url
    for task in (lambda c: c.gallery("nowhere"), lambda c: c.query("nowhere", texts=["a"], k=-1)):
        with Client(url) as client, pytest.raises(Problem) as told:
            task(client)
        with pytest.raises(Problem) as raised:
            ask(served, task)
        assert (raised.value.code, raised.value.detail) == (told.value.code, told.value.detail)

    async def nobody() -> None:
        async with AsyncClient("http://127.0.0.1:9") as client:
            await client.health()

    with pytest.raises(Unreachable, match="regraft serve"):
        asyncio.run(nobody())
