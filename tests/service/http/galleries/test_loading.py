"""A gallery that takes long to load holds up those who ask for it, and nobody else; everybody sees how far it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from index.events import Event
from regraft.connection import certificates
from service.replica.loading import load_items
from staging.waiting import until

ASKING = 50
"""More than there are threads of any pool."""


@dataclass
class Slow:
    """A gallery of three items whose load waits for `go` once it has read them."""

    path: str
    loading: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def slow(served: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow(served.gallery("plain"))
    assert store(served.http, made.path, *range(3)) == 200
    found = served.runtime.replica.find(made.path.rpartition("/")[2])

    def late(connection: Any, registry: Any, loaded: Any, progress: Any) -> None:
        load_items(connection, registry, loaded, progress)
        if loaded.name == found.name:
            made.loading.set()
            assert made.go.wait(30)

    served.runtime.replica.cache.drop(found.id)
    monkeypatch.setattr("service.replica.replica.load_items", late)
    yield made
    made.go.set()


def store(http: httpx.Client, path: str, *numbers: int) -> int:
    items = [{"id": f"i{number}", "embedding": [number, 0, 0]} for number in numbers]
    return http.post(f"{path}/items", json={"items": items}).status_code


def found(http: httpx.Client, path: str) -> set[str]:
    answer = http.post(f"{path}/query", json={"version": "plain", "embeddings": [[0, 0, 0]], "k": 100})
    assert answer.status_code == 200, answer.text
    return {match["id"] for match in answer.json()["results"][0]["matches"]}


def test_who_waits_for_a_gallery_takes_no_thread(served: Any, slow: Slow) -> None:
    quick = served.gallery("plain")

    def ask(number: int) -> int:
        with httpx.Client(base_url=served.http.base_url, timeout=30, verify=certificates()) as http:
            if number % 2:
                return len(found(http, slow.path))
            return http.post(f"{slow.path}/deployments", json={"version": "none"}).status_code

    with ThreadPoolExecutor(ASKING) as clients:
        asked = [clients.submit(ask, number) for number in range(ASKING)]
        try:
            assert slow.loading.wait(10)
            assert served.http.get(quick).status_code == 200
            assert served.http.get("/versions").status_code == 200
            assert not any(one.done() for one in asked)
        finally:
            slow.go.set()
        assert {one.result() for one in asked} == {3, 404}


def test_writes_to_it_do_not_wait_and_are_seen_by_who_does(served: Any, slow: Slow) -> None:
    quick = served.gallery("plain")
    late = range(100, 100 + ASKING)

    def write(number: int) -> int:
        with httpx.Client(base_url=served.http.base_url, timeout=30, verify=certificates()) as http:
            return store(http, slow.path, number)

    with ThreadPoolExecutor(ASKING) as clients:
        asked = clients.submit(found, served.http, slow.path)
        assert slow.loading.wait(10)
        assert set(clients.map(write, late)) == {200}
        assert served.http.delete(f"{slow.path}/items/i1").status_code == 204
        assert store(served.http, quick, 7) == 200
        assert found(served.http, quick) == {"i7"}
        assert not asked.done()
        slow.go.set()

        assert asked.result() == found(served.http, slow.path) == {"i0", "i2", *(f"i{number}" for number in late)}


def test_a_load_is_shown_while_it_is_under_way(served: Any, slow: Slow) -> None:
    name = slow.path.rpartition("/")[2]
    under_way = {"gallery": name, "done": 3, "total": 3}
    not_loaded = served.runtime.replica.find(served.gallery("plain").rpartition("/")[2])
    served.runtime.replica.cache.drop(not_loaded.id)

    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(served.http.get, slow.path)
        assert slow.loading.wait(10)
        assert served.http.get("/health/ready").json()["loading"] == [under_way]
        shown = served.http.get(slow.path).json()
        assert (shown["loading"], shown["loaded"], shown["items"]) == (under_way, False, 3)
        listed = served.http.get("/galleries").json()["galleries"]
        assert [one["loading"] for one in listed if one["loading"] or one["name"] == name] == [under_way]
        slow.go.set()
        assert (asked.result().json()["loading"], asked.result().json()["items"]) == (None, 3)

    until(lambda: served.http.get("/health/ready").json()["loading"] == [])


def test_a_load_that_takes_long_is_told_in_the_log(
    served: Any, slow: Slow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("service.replica.load_progress.LOG_SECONDS", 0)
    slow.go.set()
    with caplog.at_level("INFO"):
        assert len(found(served.http, slow.path)) == 3

    told = [one.msg for one in caplog.records if one.name.endswith("load_progress") and isinstance(one.msg, Event)]
    assert {event.fields["gallery"] for event in told} == {slow.path.rpartition("/")[2]}
    assert [(event.name, event.fields.get("done"), event.fields.get("total")) for event in told[-2:]] == [
        ("gallery_loading", 3, 3),
        ("gallery_loaded", None, None),
    ]
    assert told[-1].fields["items"] == 3
