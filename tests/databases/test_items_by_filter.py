"""Items listed and deleted by a filter: as queries take it, page by page and block by block, while others write."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as drawn
from hypothesis import strategies as st

from naive_filters import documents, filters, holds
from service.items import by_filter
from service.store.galleries import filtering
from service.store.sql.arrays import key_range
from staging.api.served import JSON, Served, problem

EVEN = {"field": "even", "eq": True}
EVERYTHING = {"or": [{"field": "n", "exists": there} for there in (True, False)]}


def numbered(served: Served, count: int) -> str:
    """A gallery of i0, i1, ..., every other one of which is even."""
    path = served.gallery("plain")
    served.store(path, {f"i{n}": {"n": n, "even": n % 2 == 0} for n in range(count)})
    return path


def page(
    served: Served, path: str, where: Any, limit: int = 1000, cursor: str | None = ""
) -> tuple[list[str], str | None]:
    asked: dict[str, Any] = {"filter": json.dumps(where), "limit": limit, "cursor": cursor}
    answer = served.http.get(f"{path}/items", params=asked)
    assert answer.status_code == 200, answer.text
    return [one["id"] for one in answer.json()["items"]], answer.json()["next"]


def delete(served: Served, path: str, where: Any, **params: Any) -> int:
    content = json.dumps({"filter": where})
    answer = served.http.post(f"{path}/items:delete", content=content, headers=JSON, params=params)
    assert answer.status_code == 200, answer.text
    assert answer.json()["missing"] == []
    return int(answer.json()["deleted"])


def walk(served: Served, path: str, where: Any, limit: int) -> list[list[str]]:
    pages: list[list[str]] = []
    cursor: str | None = ""
    while cursor is not None:
        found, cursor = page(served, path, where, limit, cursor)
        pages.append(found)
    return pages


@drawn(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(about=st.lists(documents, min_size=1, max_size=12), asked=st.lists(filters, min_size=4, max_size=8))
def test_what_is_listed_and_deleted_is_what_a_query_would_find(
    shop: Served, about: list[Any], asked: list[Any]
) -> None:
    path = shop.gallery("plain")
    shop.store(path, {f"i{n}": metadata for n, metadata in enumerate(about)})
    for where in asked:
        body = {"version": "plain", "embeddings": [[0, 0]], "k": len(about), "filter": where}
        query = shop.http.post(f"{path}/query", content=json.dumps(body), headers=JSON)
        assert query.status_code == 200, query.text

        listed = page(shop, path, where)[0]

        assert listed == [f"i{n}" for n, metadata in enumerate(about) if holds(where, metadata)]
        assert sorted(listed) == sorted(match["id"] for match in query.json()["results"][0]["matches"])
    left = dict(enumerate(about))
    for where in asked:
        going = {n for n, metadata in left.items() if holds(where, metadata)}
        assert [delete(shop, path, where, dry_run=dry_run) for dry_run in (True, False)] == [len(going)] * 2
        left = {n: metadata for n, metadata in left.items() if n not in going}
        assert page(shop, path, EVERYTHING)[0] == [f"i{n}" for n in left]
        assert shop.http.get(path).json()["items"] == len(left)


def test_pages_show_each_item_that_passes_once_in_the_order_of_the_list(shop: Served) -> None:
    path = numbered(shop, 11)

    assert walk(shop, path, EVEN, 2) == [["i0", "i2"], ["i4", "i6"], ["i8", "i10"]]
    assert walk(shop, path, {"field": "n", "eq": 11}, 2) == [[]]
    body = {"filter": EVEN, "limit": 2, "cursor": None}  # as the `next` of a last page is
    first = shop.http.post(f"{path}/items:list", json=body).json()
    assert [one["id"] for one in first["items"]] == ["i0", "i2"]
    rest = shop.http.post(f"{path}/items:list", json=body | {"cursor": first["next"], "limit": 9}).json()
    assert ([one["id"] for one in rest["items"]], rest["next"]) == (["i4", "i6", "i8", "i10"], None)
    (shown,) = shop.http.get(f"{path}/items", params={"filter": json.dumps({"field": "n", "eq": 3})}).json()["items"]
    assert shown == shop.http.get(f"{path}/items").json()["items"][3]


def test_what_passes_all_the_time_is_listed_once_whatever_is_written_between_pages(shop: Served) -> None:
    path = numbered(shop, 12)

    first, cursor = page(shop, path, EVEN, 2)
    shop.store(path, {"i0": {"even": True}, "i1": {"even": True}, "i6": {"even": False}, "i7": {"even": True}})
    shop.http.post(f"{path}/items:delete", json={"ids": ["i2", "i4"]})
    shop.store(path, {"new": {"even": True}})
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
    monkeypatch.setattr(filtering, "MAX_EXAMINED", 8)
    pages = walk(shop, path, {"field": "n", "in": [0, 30]}, 1)

    assert [found for found in pages if found] == [["i0"], ["i30"]]
    assert [] in pages
    assert sum(looked_at) < 2 * 40


def test_what_is_no_filter_is_refused(shop: Served) -> None:
    for text in ("even=true", "{}", "", '{"field": "n"}', '"n"', '{"field": "n", "eq": "\\ud800"}'):
        problem(shop.http.get("/galleries/none/items", params={"filter": text}), 422, "invalid_filter")
    problem(shop.http.get("/galleries/none/items", params={"filter": json.dumps(EVEN)}), 404, "unknown_gallery")
    problem(shop.http.post("/galleries/none/items:list", json={"filter": {}}), 422, "invalid_filter", "/filter")
    problem(shop.http.post("/galleries/none/items:list", json={}), 422, "invalid_request", "/filter")


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Deletes three items a transaction, and does something once all that pass are found, before the first goes."""
    monkeypatch.setattr(by_filter, "BLOCK", 3)
    block = by_filter._change_block

    def planned(act: Callable[[], Any]) -> None:
        todo = [act]

        def acting(*given: Any) -> int:
            if todo:
                todo.pop()()
            return block(*given)

        monkeypatch.setattr(by_filter, "_change_block", acting)

    return planned


def test_an_item_that_passes_no_longer_when_its_turn_comes_stays(shop: Served, between: Any) -> None:
    path = numbered(shop, 20)
    rewritten = {"i2": {"even": False}, "i18": {"even": False}, "i16": {"even": True, "again": True}}
    between(lambda: shop.store(path, {**rewritten, "i3": {"even": True}, "new": {"even": True}}))

    assert delete(shop, path, EVEN) == 8

    odd = [f"i{n}" for n in range(20) if n % 2]
    assert page(shop, path, EVERYTHING)[0] == [*sorted([*odd, "i2", "i18"], key=lambda name: int(name[1:])), "new"]
    assert page(shop, path, EVEN)[0] == ["i3", "new"], "what came meanwhile"


def test_an_item_deleted_meanwhile_is_not_counted(shop: Served, between: Any) -> None:
    path = numbered(shop, 10)
    between(lambda: shop.http.post(f"{path}/items:delete", json={"ids": ["i0", "i8"]}))

    assert delete(shop, path, EVEN) == 3


def test_what_ends_it_in_between_leaves_deleted_what_was(shop: Served, between: Any) -> None:
    path = numbered(shop, 20)
    between(shop.runtime.stopping.set)
    asked = {"json": {"filter": EVEN}}
    told = problem(shop.http.post(f"{path}/items:delete", **asked), 503, "shutting_down")
    shop.runtime.stopping.clear()

    assert "3 items are deleted" in told["detail"]
    assert page(shop, path, EVEN)[0] == [f"i{n}" for n in range(6, 20, 2)]
    between(lambda: shop.remove(path))
    problem(shop.http.post(f"{path}/items:delete", **asked), 404, "unknown_gallery")


BAD: list[tuple[Any, str, str]] = [
    ({}, "invalid_argument", "/ids"),
    ({"filter": None}, "invalid_argument", "/ids"),
    ({"ids": [], "filter": EVEN}, "invalid_argument", "/filter"),
    ({"ids": ["i0"], "filter": EVEN}, "invalid_argument", "/filter"),
    ({"filter": {}}, "invalid_filter", "/filter"),
    ({"filter": {"and": []}}, "invalid_filter", "/filter/and"),
    ({"filter": []}, "invalid_request", "/filter"),
]


def test_nothing_is_deleted_that_nobody_named(shop: Served) -> None:
    two, empty = numbered(shop, 2), shop.gallery("plain")

    for (body, code, pointer), dry_run, path in product(BAD, ("true", "false"), (empty, two)):
        problem(shop.http.post(f"{path}/items:delete", json=body, params={"dry_run": dry_run}), 422, code, pointer)
    assert len(page(shop, two, EVERYTHING)[0]) == 2


def test_deleting_by_ids_can_be_rehearsed(shop: Served) -> None:
    path = numbered(shop, 3)
    asked = {"json": {"ids": ["i0", "none", "i2"]}}

    rehearsed = shop.http.post(f"{path}/items:delete", **asked, params={"dry_run": "true"})

    assert rehearsed.json() == {"deleted": 2, "missing": ["none"]}
    assert len(page(shop, path, EVERYTHING)[0]) == 3
    assert shop.http.post(f"{path}/items:delete", **asked).json() == rehearsed.json()
