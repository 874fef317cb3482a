"""Queries in JSON, which no framework lies before: on the event loop or on a thread they are answered alike."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from index.gallery import Gallery
from index.metadata import filter as filters
from index.query.search_result import Degraded
from regraft.models import SearchResponse
from service.http.search import query_route
from service.replica.replica import Replica
from service.store.database.connections import Database
from service.store.galleries.deletion import delete_gallery
from staging.api.served import problem

ABOUT = {"place": {"city": "Bern", "zip": 3000}, "tags": [{"a": 1, "b": 2}, 3], "big": 2**70, "name": "é"}


@pytest.fixture
def filled(served: Any) -> str:
    path: str = served.gallery()
    items = [{"id": f"i{n}", "metadata": ABOUT, "embedding": [1.0, n, 0, 0]} for n in range(5)]
    assert served.http.post(f"{path}/items", json={"items": items}).status_code == 200
    return path


def ask(served: Any, path: str, **body: Any) -> Any:
    return served.http.post(f"{path}/query", json={"version": "v1", "embeddings": [[1, 2, 3, 4]], "k": 3, **body})


@pytest.mark.parametrize("explain", [False, True])
def test_the_answer_is_what_its_model_says(served: Any, filled: str, explain: bool) -> None:
    answer = ask(served, filled, explain=explain)

    read = SearchResponse.model_validate_json(answer.content, strict=True)
    assert answer.json() == read.model_dump(mode="json", exclude_unset=True)
    assert set(answer.json()) == set(SearchResponse.model_fields) - (set() if explain else {"explain"})
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.headers["x-request-id"]) == 32
    assert [match.metadata for match in read.results[0].matches] == [ABOUT] * 3


@pytest.mark.parametrize("small", [False, True], ids=["thread", "loop"])
def test_small_queries_are_answered_on_the_event_loop(
    served: Any, filled: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    answer_ = Gallery.answer

    def spied(*args: Any) -> Any:
        ran.append(threading.current_thread().name)
        return answer_(*args)

    monkeypatch.setattr(Gallery, "answer", spied)
    ask(served, filled)
    if not small:
        monkeypatch.setattr(query_route, "COMPARED_NUMBERS", 0)

    answer = ask(served, filled)

    assert answer.status_code == 200
    assert ran[-1].startswith("search") is not small


def test_a_filter_is_read_once(served: Any, filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(served, filled).status_code == 200  # what the gallery knows of the catalog is known from then on
    read, parse = [], filters._parse
    monkeypatch.setattr(filters, "_parse", lambda *given: (read.append(given), parse(*given))[1])

    answer = ask(served, filled, filter={"field": "name", "eq": "é"})

    assert len(answer.json()["results"][0]["matches"]) == 3
    assert len(read) == 1


@pytest.mark.parametrize("more", [{}, {"items": ["i0"]}], ids=["one part", "two parts"])
def test_items_left_out_are_those_of_all_shards(
    served: Any, filled: str, more: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, answer_ = (Degraded("v1", 6, "away"), Degraded("v1", 1, "away"), Degraded("v1", 2, "late")), Gallery.answer
    monkeypatch.setattr(Gallery, "answer", lambda *given: [found._replace(degraded=left) for found in answer_(*given)])

    told = ask(served, filled, **more).json()["degraded"]

    assert {(one["reason"], one["items"]) for one in told} == {("away", 7), ("late", 2)}


def test_a_gallery_that_another_process_deletes_is_gone_at_once(served: Any, filled: str) -> None:
    assert ask(served, filled).status_code == 200
    other = Database(served.runtime.settings.database_url)
    loaded = served.runtime.replica.find(filled.rpartition("/")[2])
    with other.write() as connection:
        delete_gallery(connection, loaded.id)
    other.close()

    problem(ask(served, filled), 404, "unknown_gallery")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"x": 1}', b'{"version": "v1", "embeddings": [[1]], "k": true}']
)
def test_what_is_wrong_is_told_as_ever(served: Any, filled: str, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path, status in ((filled, 422), ("/galleries/none", 404)):
        assert served.http.post(f"{path}/query", content=content, headers=headers).status_code == status
    problem(served.http.post(f"{filled}/query?k=3", json={}), 422, "unknown_parameter", "/k")
    assert served.http.post(f"{filled}/query", content=b"x", headers={"content-type": "text/plain"}).status_code == 415


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ([], {}),
        (["place.city", "none", "place.zip.x"], {"place": {"city": "Bern"}}),
        (["place", "place.city"], {"place": ABOUT["place"]}),
        (["place.city", "place"], {"place": ABOUT["place"]}),
        (["tags.b", "big"], {"tags": [{"b": 2}], "big": 2**70}),
        (None, ABOUT),
    ],
)
def test_matches_show_the_metadata_that_are_asked_for(
    served: Any, filled: str, fields: list[str] | None, shown: dict[str, Any]
) -> None:
    (result,) = ask(served, filled, fields=fields).json()["results"]

    assert [match["metadata"] for match in result["matches"]] == [shown] * 3


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [("a", "/fields"), ([""], "/fields/0"), (["a", "b..c"], "/fields/1"), ([1], "/fields/0"), (["a"] * 101, "/fields")],
)
def test_fields_are_paths(served: Any, filled: str, fields: Any, pointer: str) -> None:
    problem(ask(served, filled, fields=fields), 422, "invalid_argument", pointer)


def test_fields_may_differ_from_page_to_page(served: Any, filled: str) -> None:
    cursor = ask(served, filled, fields=[]).json()["next"]

    assert len(ask(served, filled, fields=["name"], cursor=cursor).json()["results"][0]["matches"]) == 2


def test_queries_of_a_gallery_that_is_being_loaded_leave_the_threads_to_others(
    served: Any, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, asked, go = served.runtime.replica, threading.Semaphore(0), threading.Event()
    slow, other = filled.rpartition("/")[2], served.gallery()
    replica.forget(replica.find(slow).id)
    replica.forget(replica.find(other.rpartition("/")[2]).id)
    load, respond = Replica._load, query_route._response

    def load_late(self: Replica, number: int) -> Any:
        loaded = load(self, number)
        assert loaded.name != slow or go.wait(10)
        return loaded

    async def noted(*args: Any) -> Any:
        asked.release()
        return await respond(*args)

    monkeypatch.setattr(Replica, "_load", load_late)
    monkeypatch.setattr(query_route, "_response", noted)
    flood = served.runtime.settings.threads + 8
    with ThreadPoolExecutor(flood) as clients:
        waiting = [clients.submit(ask, served, filled) for _ in range(flood)]
        try:
            for _ in range(flood):
                assert asked.acquire(timeout=10)
            assert ask(served, other, texts=["no encoder of texts"], embeddings=None).status_code < 500
            assert not any(one.done() for one in waiting)
        finally:
            go.set()
        assert {one.result().status_code for one in waiting} == {200}
    assert not served.runtime.loading
