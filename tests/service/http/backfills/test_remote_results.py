"""What a remote worker sends back is checked, and looked at as far as a chunk can go."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from service.http.backfills.remote_results import MAX_EDGES
from service.schemas import MAX_CHUNK
from service.store.tables import embedding
from staging.api.served import problem
from staging.states.working import sent_back, vector

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("where", ["moved", "failed"])
def test_more_than_a_chunk_can_hold_is_refused_before_it_is_looked_at(served: Any, where: str) -> None:
    one = {"item": 1, "seq": 1, **({"vector": ""} if where == "moved" else {"reason": ""})}
    # What comes behind the last that may be is no result at all, and nobody notices.
    body = {"moved": [], where: [one] * MAX_CHUNK + [None]}

    told = problem(served.http.post("/work/1?lease=x", json=body), 422, "invalid_request", f"/{where}")

    assert f"at most {MAX_CHUNK}" in told["detail"]


@pytest.mark.parametrize(("path", "body"), [("/work/1?lease=x", {"moved": []}), ("/work:claim", {"worker": "w"})])
def test_of_a_list_of_what_is_wrong_one_error_is_made(served: Any, path: str, body: dict[str, Any]) -> None:
    where = "edges" if "moved" in body else "kinds"
    told = problem(served.http.post(path, json={**body, where: ["x"] * 20}), 422, "invalid_request", f"/{where}/0")

    assert len(told["errors"]) == 1


def test_more_edges_than_there_may_be_are_not_looked_at(served: Any) -> None:
    body = {"moved": [], "edges": [1] * MAX_EDGES + [None]}

    problem(served.http.post("/work/1?lease=x", json=body), 422, "invalid_request", "/edges")


@pytest.fixture
def task(served: Any, pictures: list[bytes]) -> tuple[str, dict[str, str], list[dict[str, Any]]]:
    served.backfill(served.filled(pictures, "v1", "v2"), chunk_size=20)
    found = served.http.post("/work:claim", json={"worker": "w"}).json()
    place, params = f"/work/{found['chunk']}", {"lease": found["lease"]}
    return place, params, served.http.get(place, params=params).json()["items"]


@pytest.mark.parametrize(
    ("changes", "pointer", "says"),
    [
        ({"vector": vector(1, 0, 0)}, "/moved/0/vector", "numbers, not 3"),
        ({"vector": vector(1, 0, 0, 0, 0, float("nan"))}, "/moved/0/vector", "finite"),
        ({"vector": vector(0, 0, 0, 0, 0, 0)}, "/moved/0/vector", "all-zero"),
        ({"vector": vector(3, 0, 0, 0, 0, 0)}, "/moved/0/vector", "length is 3"),
        ({"vector": "?"}, "/moved/0/vector", "base64"),
        ({"vector": base64.b64encode(b"abc").decode()}, "/moved/0/vector", "3 bytes"),
        ({"side": vector(1)}, "/moved/0/side", "0 numbers"),
        ({"uncertainty": -1}, "/moved/0/uncertainty", "greater"),
        ({"uncertainty": 1e300}, "/moved/0/uncertainty", "less"),
    ],
)
def test_a_wrong_vector_is_refused_and_named(
    served: Any, task: Any, changes: dict[str, Any], pointer: str, says: str
) -> None:
    place, params, items = task

    refused = served.http.post(place, params=params, json=sent_back(items, **changes))

    assert refused.status_code == 422
    (first, *_) = refused.json()["errors"]
    assert first["pointer"] == pointer
    assert says in refused.json()["detail"]
    assert served.http.post(place, params=params, json=sent_back(items)).json()["done"] == 20


def test_the_edge_of_some_items_may_tell_how_unsure_it_is_and_that_of_others_not(served: Any, task: Any) -> None:
    place, params, items = task
    given, wanted = sent_back(items), {}
    for number, moved in enumerate(given["moved"]):
        own = [np.float32(np.cos(number)), np.float32(np.sin(number)), 0, 0, 0, 0]
        unsure = number / 4 if number % 3 == 1 else None
        moved |= {"vector": vector(*own), "uncertainty": unsure}
        wanted[moved["item"]] = (np.array(own, "<f4").tobytes(), unsure)

    assert served.http.post(place, params=params, json=given).json()["done"] == 20

    with served.runtime.database.lookup() as connection:
        made = (embedding.c.item_id.in_(list(wanted)), embedding.c.version_id == served.runtime.registry.named("v2").id)
        found = connection.execute(
            select(embedding.c.item_id, embedding.c.vector, embedding.c.uncertainty).where(*made)
        )
        assert {key: (held, unsure) for key, held, unsure in found} == wanted


def test_items_must_be_those_of_the_chunk_each_once(served: Any, task: Any) -> None:
    place, params, items = task
    foreign = {**items[0], "item": 10**9}

    for given, says in (
        (items[:-1], "1 items of the chunk are missing"),
        ([*items, items[0]], "named twice"),
        ([*items, foreign], "is not in this chunk"),
        ([], "20 items"),
    ):
        refused = served.http.post(place, params=params, json=sent_back(given))
        assert refused.status_code == 422
        assert says in refused.json()["detail"]
    assert served.http.post(place, params=params, json=sent_back(items)).json()["done"] == 20


def test_an_item_that_changed_meanwhile_is_skipped(served: Any, task: Any) -> None:
    place, params, items = task
    changed = [{**items[0], "seq": items[0]["seq"] - 1}, *items[1:]]

    assert served.http.post(place, params=params, json=sent_back(changed)).json()["skipped"] == 1


def test_failures_are_noted_with_their_reason(served: Any, task: Any) -> None:
    place, params, items = task
    failed = [{"item": items[0]["item"], "seq": items[0]["seq"], "reason": "dark", "retry": True}]

    counts = served.http.post(place, params=params, json={**sent_back(items[1:]), "failed": failed}).json()

    assert counts == {"done": 19, "failed": 0, "retried": 1, "skipped": 0}
