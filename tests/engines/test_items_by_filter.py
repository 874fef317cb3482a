"""Items listed by a filter: as queries take it, page by page, while others write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as drawn
from hypothesis import strategies as st

from filters import documents, filters, holds
from service.backfills import filtering
from service.settings import Settings
from service.store.sql_arrays import key_range
from staging.builders import make_version
from staging.served import Served, problem, serving

EVEN = {"field": "even", "eq": True}


@pytest.fixture
def shop(settings: Settings, tmp_path: Path) -> Iterator[Served]:
    version = make_version(tmp_path / "plain", "plain", 2, space={"kind": "l2"}, encoder=False)
    with serving(settings) as served:
        assert served.register(version).status_code == 201
        yield served


def store(served: Served, path: str, about: dict[str, Any]) -> None:
    items = [
        {"id": name, "metadata": metadata, "embedding": [n, 0]} for n, (name, metadata) in enumerate(about.items())
    ]
    answer = served.http.post(f"{path}/items", content=json.dumps({"items": items}), headers=JSON)
    assert answer.json()["failed"] == 0, answer.text


JSON = {"content-type": "application/json"}


def numbered(served: Served, count: int) -> str:
    """A gallery of i0, i1, ..., every other one of which is even."""
    path = served.gallery("plain")
    store(served, path, {f"i{n}": {"n": n, "even": n % 2 == 0} for n in range(count)})
    return path


def page(
    served: Served, path: str, where: Any, limit: int = 1000, cursor: str | None = ""
) -> tuple[list[str], str | None]:
    asked: dict[str, Any] = {"filter": json.dumps(where), "limit": limit, "cursor": cursor}
    answer = served.http.get(f"{path}/items", params=asked)
    assert answer.status_code == 200, answer.text
    return [one["id"] for one in answer.json()["items"]], answer.json()["next"]


def walk(served: Served, path: str, where: Any, limit: int) -> list[list[str]]:
    pages: list[list[str]] = []
    cursor: str | None = ""
    while cursor is not None:
        found, cursor = page(served, path, where, limit, cursor)
        pages.append(found)
    return pages


@drawn(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(about=st.lists(documents, min_size=1, max_size=12), asked=st.lists(filters, min_size=4, max_size=8))
def test_a_page_lists_what_a_query_would_find(shop: Served, about: list[Any], asked: list[Any]) -> None:
    path = shop.gallery("plain")
    store(shop, path, {f"i{n}": metadata for n, metadata in enumerate(about)})
    for where in asked:
        body = {"version": "plain", "embeddings": [[0, 0]], "k": len(about), "filter": where}
        query = shop.http.post(f"{path}/query", content=json.dumps(body), headers=JSON)
        assert query.status_code == 200, query.text

        listed = page(shop, path, where)[0]

        assert listed == [f"i{n}" for n, metadata in enumerate(about) if holds(where, metadata)]
        assert sorted(listed) == sorted(match["id"] for match in query.json()["results"][0]["matches"])


def test_pages_show_each_item_that_passes_once_in_the_order_of_the_list(shop: Served) -> None:
    path = numbered(shop, 11)

    assert walk(shop, path, EVEN, 2) == [["i0", "i2"], ["i4", "i6"], ["i8", "i10"]]
    assert walk(shop, path, {"field": "n", "eq": 11}, 2) == [[]]
    (shown,) = shop.http.get(f"{path}/items", params={"filter": json.dumps({"field": "n", "eq": 3})}).json()["items"]
    assert shown == shop.http.get(f"{path}/items").json()["items"][3]


def test_what_passes_all_the_time_is_listed_once_whatever_is_written_between_pages(shop: Served) -> None:
    path = numbered(shop, 12)

    first, cursor = page(shop, path, EVEN, 2)
    store(shop, path, {"i0": {"even": True}, "i1": {"even": True}, "i6": {"even": False}, "i7": {"even": True}})
    shop.http.post(f"{path}/items:delete", json={"ids": ["i2", "i4"]})
    store(shop, path, {"new": {"even": True}})
    pages = [first]
    while cursor is not None:
        found, cursor = page(shop, path, EVEN, 2, cursor)
        pages.append(found)

    assert pages == [["i0", "i2"], ["i7", "i8"], ["i10", "new"]]


def test_a_page_looks_at_so_many_items_and_the_next_goes_on_there(
    shop: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = numbered(shop, 40)
    looked_at: list[int] = []
    read = key_range

    def counting(*asked: Any) -> Any:
        looked_at.append(len(keys := read(*asked)))
        return keys

    monkeypatch.setattr(filtering, "key_range", counting)
    monkeypatch.setattr(filtering, "MOST_LOOKED_AT", 8)
    pages = walk(shop, path, {"field": "n", "in": [0, 30]}, 1)

    assert [found for found in pages if found] == [["i0"], ["i30"]]
    assert [] in pages
    assert sum(looked_at) < 2 * 40


@pytest.mark.parametrize(
    ("text", "pointer"), [("even=true", "/filter"), ("{}", "/filter"), ("", "/filter"), ('{"field": "n"}', "/filter")]
)
def test_what_is_no_filter_is_refused(shop: Served, text: str, pointer: str) -> None:
    problem(shop.http.get("/galleries/none/items", params={"filter": text}), 422, "invalid_filter", pointer)
