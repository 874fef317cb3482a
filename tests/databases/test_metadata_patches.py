"""Metadata of items that are there, changed by JSON Merge Patch: by their ids, and of all that pass a filter."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as drawn
from hypothesis import strategies as st

from naive_filters import documents, filters, holds
from service.items import by_filter
from service.items.metadata import merge_patch
from service.settings import Settings
from staging.api.served import JSON, Served, problem, serving

EVEN = {"field": "even", "eq": True}
EVERYTHING = {"or": [{"field": "n", "exists": there} for there in (True, False)]}


def patch(served: Served, path: str, body: Any, **params: Any) -> Any:
    return served.http.patch(f"{path}/items", content=json.dumps(body), headers=JSON, params=params)


def stored(served: Served, path: str) -> dict[str, Any]:
    return {one["id"]: one["metadata"] for one in served.http.get(f"{path}/items").json()["items"]}


@pytest.mark.parametrize(
    ("target", "change", "result"),
    [  # RFC 7396, appendix A: those whose patch is an object
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_a_patch_makes_what_its_specification_says(target: Any, change: Any, result: Any) -> None:
    before = json.dumps(target)

    assert merge_patch(target, change) == result
    assert json.dumps(target) == before


@drawn(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    about=st.lists(documents, min_size=1, max_size=12),
    changes=st.lists(st.tuples(filters, documents), min_size=2, max_size=5),
    asked=st.lists(filters, min_size=3, max_size=6),
)
def test_what_passes_is_patched_and_queries_see_it_at_once(
    shop: Served, about: list[Any], changes: list[Any], asked: list[Any]
) -> None:
    path, now = shop.gallery("plain"), {f"i{n}": metadata for n, metadata in enumerate(about)}
    shop.store(path, now)
    for where, change in changes:
        passing = [name for name, metadata in now.items() if holds(where, metadata)]
        for dry_run in ("true", "false"):
            told = patch(shop, path, {"filter": where, "metadata": change}, dry_run=dry_run).json()
            assert told == {"updated": len(passing), "failed": 0, "errors": []}
        now |= {name: merge_patch(now[name], change) for name in passing}
    assert stored(shop, path) == now
    for where in asked:
        body = {"version": "plain", "embeddings": [[0, 0]], "k": len(about), "filter": where}
        query = shop.http.post(f"{path}/query", content=json.dumps(body), headers=JSON)
        found = {match["id"]: match["metadata"] for match in query.json()["results"][0]["matches"]}
        assert found == {name: metadata for name, metadata in now.items() if holds(where, metadata)}


def test_items_are_patched_each_its_own_way_and_nothing_else_of_them_changes(shop: Served, settings: Settings) -> None:
    path = shop.gallery("plain")
    shop.store(path, {"a": {"price": 3, "tags": ["x"]}, "b": {"price": 4}, "gone": {}})
    shop.http.delete(f"{path}/items/gone")
    before = {one["id"]: one for one in shop.http.get(f"{path}/items:embeddings").json()["items"]}
    items = [
        {"id": "a", "metadata": {"price": 2, "sale": {"until": 5}}},
        {"id": "gone", "metadata": {"price": 1}},
        {"id": "b"},
        {"id": "a", "metadata": {"price": 9}},
        {"id": "", "metadata": {}},
        {"id": "b", "metadata": 3},
        {"id": "b", "metadata": {}, "embedding": [1, 0]},
    ]

    told = patch(shop, path, {"items": items})

    assert told.status_code == 200, told.text
    assert (told.json()["updated"], told.json()["failed"]) == (1, 6)
    assert [(one["index"], one["code"], one["pointer"]) for one in told.json()["errors"]] == [
        (1, "unknown_item", "/items/1/id"),
        (2, "invalid_item", "/items/2/metadata"),
        (3, "duplicate_id", "/items/3/id"),
        (4, "invalid_item", "/items/4/id"),
        (5, "invalid_item", "/items/5/metadata"),
        (6, "invalid_body", "/items/6/embedding"),
    ]
    after = {one["id"]: one for one in shop.http.get(f"{path}/items:embeddings").json()["items"]}
    assert after["b"] == before["b"]
    changed = {name for name in after["a"] if after["a"][name] != before["a"][name]}
    assert changed == {"metadata", "seq"}
    assert after["a"]["metadata"] == {"price": 2, "tags": ["x"], "sale": {"until": 5}}
    with serving(settings) as started:
        assert stored(started, path) == {name: one["metadata"] for name, one in after.items()}


def test_an_atomic_batch_and_a_dry_run_change_nothing(shop: Served) -> None:
    path = shop.gallery("plain")
    shop.store(path, {"a": {"n": 1}, "b": {"n": 2}})
    good = [{"id": name, "metadata": {"n": None, "m": 1}} for name in ("a", "b")]

    refused = patch(shop, path, {"items": [*good, {"id": "c", "metadata": {}}]}, atomic="true")
    assert problem(refused, 422, "items_refused")["errors"][0]["pointer"] == "/items/2/id"
    problem(patch(shop, path, {"items": [{"id": "c", "metadata": {}}]}), 422, "items_refused")
    assert patch(shop, path, {"items": good}, dry_run="true").json()["updated"] == 2
    assert stored(shop, path) == {"a": {"n": 1}, "b": {"n": 2}}
    assert patch(shop, path, {"items": good}, atomic="true").json()["updated"] == 2
    assert stored(shop, path) == {"a": {"m": 1}, "b": {"m": 1}}


def test_an_item_that_would_hold_too_much_is_named_and_the_others_are_patched(
    shop: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_filter, "BLOCK", 3)
    path, most = shop.gallery("plain"), shop.runtime.settings.max_metadata_bytes
    about = {f"i{n}": {"even": n % 2 == 0} for n in range(20)}
    shop.store(path, about | {"i4": {"even": True, "long": "x" * (most - 100)}})
    note = {"note": "y" * 200}

    told = patch(shop, path, {"filter": EVEN, "metadata": note}).json()

    assert (told["updated"], told["failed"]) == (9, 1)
    assert [(one["id"], one["code"], one["pointer"]) for one in told["errors"]] == [("i4", "invalid_item", "/metadata")]
    noted = [name for name, metadata in stored(shop, path).items() if "note" in metadata]
    assert noted == [f"i{n}" for n in range(0, 20, 2) if n != 4]
    assert patch(shop, path, {"items": [{"id": "i4", "metadata": note}]}).status_code == 422


def test_a_patch_moves_nothing_and_ends_no_backfill(shop: Served, tmp_path: Path) -> None:
    shop.add("later", 3, edges=[("plain", "truncate")], encoder=False, space={"kind": "l2"})
    path = shop.gallery("plain")
    shop.store(path, {"a": {}, "b": {}})
    shop.deploy(path, "later")
    number = shop.backfill(path, kind="supplied")

    assert patch(shop, path, {"filter": EVERYTHING, "metadata": {"seen": True}}).json()["updated"] == 2

    assert [shop.http.get(f"/backfills/{number}").json()[name] for name in ("total", "done", "state")] == [
        2,
        0,
        "running",
    ]
    assert shop.http.get(path).json()["mix"] == {"plain": 2}
    embeddings = np.eye(3)[:2].tolist()
    sent = [{"id": name, "embedding": row} for name, row in zip("ab", embeddings, strict=True)]
    assert shop.http.put(f"{path}/items:embeddings", json={"version": "later", "items": sent}).json()["stored"] == 2
    assert shop.http.get(f"/backfills/{number}").json()["state"] == "done"
    assert stored(shop, path) == {"a": {"seen": True}, "b": {"seen": True}}


DEEP: Any = {"a": 1}
for _ in range(40):
    DEEP = {"a": DEEP}
BAD: list[tuple[Any, str, str]] = [
    ({}, "invalid_body", "/items"),
    ({"items": []}, "invalid_body", "/items"),
    ({"items": {}}, "invalid_request", "/items"),
    ({"metadata": {}}, "invalid_argument", "/metadata"),
    ({"items": [{"id": "a", "metadata": {}}], "metadata": {}}, "invalid_argument", "/metadata"),
    ({"items": [{"id": "a", "metadata": {}}], "filter": EVEN, "metadata": {}}, "invalid_argument", "/filter"),
    ({"filter": EVEN}, "invalid_argument", "/metadata"),
    ({"filter": {}, "metadata": {}}, "invalid_filter", "/filter"),
    ({"filter": EVEN, "metadata": []}, "invalid_request", "/metadata"),
    ({"filter": EVEN, "metadata": DEEP}, "invalid_item", "/metadata"),
]


def test_what_is_no_patch_is_refused_and_changes_nothing(shop: Served) -> None:
    path = shop.gallery("plain")
    shop.store(path, {"a": {"even": True}})

    for (body, code, pointer), dry_run in product(BAD, ("true", "false")):
        problem(patch(shop, path, body, dry_run=dry_run), 422, code, pointer)
    problem(patch(shop, path, {"filter": EVEN, "metadata": {}}, atomic="true"), 422, "invalid_argument", "/atomic")
    problem(patch(shop, "/galleries/none", {"items": [{"id": "a", "metadata": {}}]}), 404, "unknown_gallery")
    assert stored(shop, path) == {"a": {"even": True}}
