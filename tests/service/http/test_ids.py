"""Ids that would climb out of their path, and what a client that joins paths does with those there are."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from index.item_id import is_item_id

Problem = Callable[..., dict[str, Any]]

CLIMBING = [".", "..", "../b", "a/..", "a/./b", r"a\..\b", "..\u00a0", "%2e%2E", "%252e.", "..%2fb", "..?x=1", "a/..#y"]


def listed(*ids: str) -> dict[str, Any]:
    return {"items": [{"id": i, "embedding": [1, 2, 3, 4]} for i in ids]}


@pytest.mark.parametrize("climbing", CLIMBING)
def test_no_item_can_be_named_so_that_its_path_is_anothers(served: Any, problem: Problem, climbing: str) -> None:
    path = served.gallery()

    refused = problem(served.http.post(f"{path}/items", json=listed(climbing)), 422, "items_refused", "/items/0/id")

    assert refused["errors"][0]["code"] == "invalid_item"
    assert not is_item_id(climbing)


def test_a_client_that_joins_paths_deletes_the_items_and_not_their_gallery(served: Any) -> None:
    path = served.gallery()
    served.http.post(f"{path}/items", json=listed(*CLIMBING, "a..b", "...", ".a", "a/b"))

    for item in served.http.get(f"{path}/items").json()["items"]:
        assert served.http.delete(f"{path}/items/{item['id']}").status_code == 204  # httpx shortens it

    assert served.http.get(path).json()["items"] == 0


@pytest.mark.parametrize(
    "below",
    ["/", "//", "/.", "/items", "/items/", "/items//", "/items/..", "/items/%2e%2e", "/items/%2E%2E/", "/items/a/.."],
)
def test_no_path_below_a_gallery_deletes_it(served: Any, below: str) -> None:
    path = served.gallery()
    base = served.http.base_url
    raw = http.client.HTTPConnection(base.host, base.port)  # sends the path as it is
    raw.request("DELETE", f"/v1{path}{below}")

    assert raw.getresponse().status in {404, 405}

    raw.close()
    assert served.http.get(path).status_code == 200


def test_a_gallery_cannot_be_named_so_that_its_path_is_anothers(served: Any, problem: Problem) -> None:
    for name in ("..", ".", "a/..", "%2e%2e", ""):
        problem(served.http.post("/galleries", json={"name": name}), 422, "invalid_argument", "/name")


def test_ids_that_no_item_has_are_unknown_wherever_they_are_named(served: Any, problem: Problem) -> None:
    path = served.gallery()

    assert served.http.post(f"{path}/items:delete", json={"ids": ["..", "a\tb"]}).json()["missing"] == ["..", "a\tb"]
    problem(served.http.get(f"{path}/items/{quote('a/../b', safe='')}"), 404, "unknown_item")
