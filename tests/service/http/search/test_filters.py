"""Metadata filters over HTTP: in every body, exact while items come, change, move and go, and after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.settings import Settings
from staging.api.served import problem, serving

ITEMS: dict[str, dict[str, Any]] = {
    "a": {"city": "Bern", "price": 3, "tags": ["new", "red"], "shop": {"open": True}},
    "b": {"city": "Basel", "price": 3.0, "tags": ["red"], "shop": {"open": False}},
    "c": {"city": "Biel", "price": 12.5, "shop": {}},
    "d": {"city": None, "a.b": 1},
    "e": {},
}


def store(served: Any, path: str, items: dict[str, dict[str, Any]]) -> None:
    listed = [{"id": i, "metadata": about, "embedding": [float(n), 0, 0]} for n, (i, about) in enumerate(items.items())]
    response = served.http.post(f"{path}/items", json={"items": listed})
    assert response.json()["stored"] == len(items), response.text


def ask(served: Any, path: str, filter_json: Any, **fields: Any) -> Any:
    body = {"version": "plain", "embeddings": [[0, 0, 0]], "k": 3, "filter": filter_json, **fields}
    return served.http.post(f"{path}/query", json=body)


def ids(response: Any, result: int = 0) -> list[str]:
    assert response.status_code == 200, response.text
    return [match["id"] for match in response.json()["results"][result]["matches"]]


@pytest.fixture(scope="module")
def shop(served: Any) -> str:
    path: str = served.gallery("plain")
    store(served, path, ITEMS)
    return path


@pytest.mark.parametrize(
    ("filter_json", "expected"),
    [
        (None, ["a", "b", "c"]),
        ({"field": "city", "eq": "Biel"}, ["c"]),
        ({"field": "city", "eq": None}, ["d"]),
        ({"field": "price", "eq": 3}, ["a", "b"]),
        ({"field": "city", "in": ["Biel", "Bern", "Genf"]}, ["a", "c"]),
        ({"field": "city", "prefix": "B"}, ["a", "b", "c"]),
        ({"field": "price", "range": {"gt": 3, "lte": 12.5}}, ["c"]),
        ({"field": "tags", "eq": "red"}, ["a", "b"]),
        ({"field": "shop.open", "eq": False}, ["b"]),
        ({"field": "shop", "exists": True}, ["a", "b", "c"]),
        ({"field": ["a.b"], "eq": 1}, ["d"]),
        ({"field": "a.b", "exists": True}, []),
        ({"not": {"field": "city", "exists": True}}, ["e"]),
        ({"and": [{"field": "tags", "eq": "red"}, {"not": {"field": "tags", "eq": "new"}}]}, ["b"]),
        ({"or": [{"field": "price", "range": {"gte": 10}}, {"field": "tags", "eq": "new"}]}, ["a", "c"]),
    ],
)
def test_only_items_that_pass_are_ranked(served: Any, shop: str, filter_json: Any, expected: list[str]) -> None:
    assert ids(ask(served, shop, filter_json)) == expected


def test_a_filter_goes_with_pages_thresholds_items_and_explain(served: Any, shop: str) -> None:
    filter_json = {"field": "city", "prefix": "B"}
    first = ask(served, shop, filter_json, k=2, explain=True)
    assert ids(first) == ["a", "b"]
    assert first.json()["explain"]["seconds"]["filter"] > 0
    rest = ask(served, shop, filter_json, k=2, cursor=first.json()["next"])
    assert (ids(rest), rest.json()["next"]) == (["c"], None)
    assert ids(ask(served, shop, filter_json, threshold=1.5)) == ["a", "b"]
    similar = served.http.post(f"{shop}/query", json={"items": ["a", "e"], "k": 4, "filter": filter_json})
    assert [ids(similar, 0), ids(similar, 1)] == [["b", "c"], ["c", "b", "a"]]


def test_a_cursor_belongs_to_its_filter(served: Any, shop: str) -> None:
    cursor = ask(served, shop, {"field": "city", "prefix": "B"}, k=1).json()["next"]
    problem(
        ask(served, shop, {"field": "city", "prefix": "Ba"}, k=1, cursor=cursor), 422, "invalid_argument", "/cursor"
    )


@pytest.mark.parametrize(
    ("filter_json", "pointer", "said"),
    [
        ({"field": "city", "like": "B"}, "/filter/like", "legal: eq, in, range, prefix, exists"),
        ({"and": [{"field": "city", "eq": ["Bern"]}]}, "/filter/and/0/eq", "a string, a number, true, false or null"),
        ({"field": "price", "range": {"from": 1}}, "/filter/range/from", "gt, gte and lt, lte"),
        ({"or": []}, "/filter/or", "at least one"),
        ("city = 'Bern'", "/filter", "JSON object"),
        (False, "/filter", "JSON object"),
    ],
)
def test_a_bad_filter_is_refused_with_what_is_legal(
    served: Any, shop: str, filter_json: Any, pointer: str, said: str
) -> None:
    assert said in problem(ask(served, shop, filter_json), 422, "invalid_filter", pointer)["detail"]


def test_a_filter_in_a_form_is_json(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery("v1")
    served.ingest(path, {"x": pictures[0]}, color="red")
    served.ingest(path, {"y": pictures[0]}, color="blue")

    def asked(text: str) -> Any:
        files = [("images", ("q.png", pictures[0]))]
        return served.http.post(f"{path}/query", data={"k": "2", "filter": text}, files=files)

    assert ids(asked(json.dumps({"field": "color", "eq": "blue"}))) == ["y"]
    problem(asked("color=blue"), 422, "invalid_body", "/filter")
    problem(asked('{"field": "color", "is": "blue"}'), 422, "invalid_filter", "/filter/is")


def test_a_filter_follows_every_write(tmp_path: Path, versions: dict[str, Any], pictures: list[bytes]) -> None:
    settings = Settings(data=tmp_path)
    red = {"field": "color", "eq": "red"}
    with serving(settings) as served:
        for name in ("v1", "v2"):
            served.register(versions[name])
        path = served.gallery("v1")

        def found(server: Any = served) -> set[str]:
            response = server.query(path, pictures[0], k=2, filter=json.dumps(red))
            return set(ids(response))

        for name in "abcd":
            served.ingest(path, {name: pictures[0]}, color="red" if name in "ab" else "blue")
        assert found() == {"a", "b"}
        served.ingest(path, {"b": pictures[0]}, color="blue")
        served.ingest(path, {"c": pictures[0]}, color="red")
        assert found() == {"a", "c"}
        served.http.delete(f"{path}/items/a")
        assert found() == {"c"}
        served.deploy(path, "v2")
        served.ingest(path, {"d": pictures[0]}, color="red")
        assert found() == {"c", "d"}, "over two versions"
    with serving(settings) as served:
        assert found(served) == {"c", "d"}, "after a restart"
