"""Queries that come in one pass of the event loop are searched together, and answered as if each had come alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from sqlalchemy import event
from starlette.responses import Response

from index.errors import ModeUnavailable, RegraftError
from index.gallery import Gallery
from service.backfills.traffic import Traffic
from service.http.search.batcher import MAX_BATCH, QueryBatcher
from service.http.search.query_route import RawQuery, _response
from service.http.search.request import fields_of
from service.http.search.search import as_json
from service.http.server.auth import Exchange
from service.store.database.connections import Database

TRIES = 5
"""Behind any write of the service's own threads one of the queries goes another way, and is searched alone."""


@pytest.fixture(autouse=True)
def _nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a write of the thread that counts matches the name of a gallery is looked up anew, on another thread."""
    monkeypatch.setattr(Traffic, "flush", lambda self: None)


@pytest.fixture
def filled(served: Any) -> str:
    path: str = served.gallery()
    items = [{"id": f"i{n}", "metadata": {"n": n}, "embedding": [1.0, n, 0, 0]} for n in range(9)]
    assert served.http.post(f"{path}/items", json={"items": items}).status_code == 200
    name = path.rpartition("/")[2]
    together(served, name, [{}])  # makes its view
    return name


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each search had."""
    sizes, answer = [], Gallery.answer

    def spied(self: Gallery, asks: Any) -> Any:
        found = answer(self, asks)
        sizes.append(len(found[0].scores_QK))
        return found

    monkeypatch.setattr(Gallery, "answer", spied)
    return sizes


def raw_query(name: str, body: bytes) -> RawQuery:
    """A query of a client that stays."""
    unused: Any = None
    return RawQuery(Exchange(unused, unused, {}, 0), name, fields_of, body, None, as_json)


def together(served: Any, name: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    """What queries get that come at once; errors as they are."""

    async def ask() -> list[Any]:
        batcher = QueryBatcher()
        raw = [orjson.dumps({"version": "v1", "embeddings": [[1, 2, 3, 4]], "k": 3, **body}) for body in bodies]
        asked = [raw_query(name, one) for one in raw]
        return await asyncio.gather(*(_response(served.runtime, batcher, one) for one in asked), return_exceptions=True)

    return [read(one) if isinstance(one, Response) else one for one in asyncio.run(ask())]


def read(response: Response) -> dict[str, Any]:
    answer: dict[str, Any] = orjson.loads(response.body)
    return {name: value for name, value in answer.items() if name != "took_ms"}


def test_each_gets_what_it_would_get_alone(served: Any, filled: str, searched: list[int]) -> None:
    bodies: list[Any] = [
        {"embeddings": [[1, n, row, 0] for row in range(1 + n % 3)], "k": 1 + n % 2, "exact": n % 5 == 0}
        for n in range(4 * MAX_BATCH)
    ]

    answers = together(served, filled, bodies)

    assert max(searched) <= MAX_BATCH
    assert len(searched) < len(bodies) // 2
    assert [together(served, filled, [body]) for body in bodies] == [[answer] for answer in answers]
    for body, answer in zip(bodies, answers, strict=True):
        assert [one["query"] for one in answer["results"]] == [
            f"/embeddings/{n}" for n in range(len(body["embeddings"]))
        ]
        assert {len(one["matches"]) for one in answer["results"]} == {body["k"]}


def test_the_error_of_one_is_no_others(served: Any, filled: str, searched: list[int]) -> None:
    bodies: list[Any] = [
        {},
        {"embeddings": [[1, 2]]},
        {"mode": "calibrated"},
        {"k": 0},
        {"mode": "calibrated"},
        {"version": "none"},
        {},
    ]

    for _ in range(TRIES):
        right, *wrong, last = together(served, filled, bodies)
        if searched[-1] == 2:
            break

    assert right == last
    assert searched[-1] == 2
    assert [type(one) is ModeUnavailable for one in wrong] == [False, True, False, True, False]
    assert all(isinstance(one, RegraftError) for one in wrong)


def test_metadata_of_others_make_no_answer_too_long(
    served: Any, filled: str, searched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [{"k": 3}, {"k": 3}, {"k": 9}]
    (right,) = together(served, filled, bodies[:1])
    monkeypatch.setitem(served.runtime.settings.__dict__, "max_body_bytes", 3 * len('{"n":1}'))

    for _ in range(TRIES):
        searched.clear()
        first, second, too_long = together(served, filled, bodies)
        if 2 in searched:
            break

    assert 2 in searched
    assert first == second == right
    assert "metadata of all matches exceed 21" in str(too_long)


def test_one_that_is_cancelled_leaves_the_others_their_answers(served: Any, filled: str) -> None:
    async def ask() -> Any:
        batcher, raw = QueryBatcher(), orjson.dumps({"version": "v1", "embeddings": [[1, 2, 3, 4]]})
        asked = [asyncio.ensure_future(_response(served.runtime, batcher, raw_query(filled, raw))) for _ in range(3)]
        await asyncio.sleep(0)
        asked[1].cancel()
        return await asyncio.gather(*asked, return_exceptions=True)

    first, cancelled, last = asyncio.run(ask())

    assert isinstance(cancelled, asyncio.CancelledError)
    assert read(first) == read(last)


def test_who_waits_for_a_gallery_that_is_written_does_so_on_a_thread(
    served: Any, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, told = together(served, filled, [{}, {}]), iter([9.0] * 2)
    monkeypatch.setattr(Gallery, "rows_scanned", lambda *_: next(told, float("inf")))

    assert together(served, filled, [{}, {}]) == before


def test_a_query_of_embeddings_needs_no_statement(served: Any, filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, said, looks, moment = threading.current_thread(), [], [0], Database.commit_marker

    def note(_c: Any, _u: Any, statement: str, *_: Any) -> None:
        if threading.current_thread() is here:
            said.append(statement)

    def counted(self: Database) -> object:
        looks[0] += threading.current_thread() is here
        return moment(self)

    monkeypatch.setattr(Database, "commit_marker", counted)
    bodies: list[Any] = [{}, {"fields": []}, {"fields": ["n"]}, {"k": 2}]
    engines = [getattr(served.runtime.database, name) for name in ("_finder", "_reader", "_writer")]
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)

    answers = together(served, filled, bodies)

    for engine in engines:
        event.remove(engine, "before_cursor_execute", note)
    assert [answer["results"][0]["matches"][0]["metadata"] for answer in answers] == [{"n": 2}, {}, {"n": 2}, {"n": 2}]
    assert (said, looks) == ([], [1])
