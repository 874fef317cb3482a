"""An answer speaks of one feed number: vectors, filters and what is shown belong together, whoever writes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from service.store.galleries.gallery import take_seq
from service.store.galleries.items import NewItem, delete_items, store_items

PLACES = {"red": [1.0, 0.0, 0.0], "blue": [0.0, 1.0, 0.0]}
RED = {"version": "plain", "embeddings": [PLACES["red"]]}


@pytest.fixture
def red(served: Any) -> Any:
    """The path of a gallery whose items are all red, and lie there."""
    path = served.gallery("plain")
    items = [{"id": f"i{n}", "metadata": {"colour": "red"}, "embedding": PLACES["red"]} for n in range(5)]
    assert served.http.post(f"{path}/items", json={"items": items}).json()["stored"] == 5
    return path


@contextmanager
def behind(served: Any, path: str, *deleted: str) -> Iterator[None]:
    """Every item turns blue, or these go, in SQL; the replica learns of it at the end."""
    runtime = served.runtime
    loaded = runtime.replica.find(path.rpartition("/")[2])
    version_id = runtime.registry.named("plain").id
    vector = np.asarray(PLACES["blue"], np.float32)
    items = [NewItem(f"i{n}", {"colour": "blue"}, "encoded", vector) for n in range(5)]
    with loaded.applying:
        with runtime.database.write() as connection:
            if deleted:
                delete_items(connection, loaded.id, deleted)
            else:
                store_items(connection, loaded.id, version_id, items, take_seq(connection, loaded.id, len(items)))
        yield


def ingest_answer(answer: dict[str, Any]) -> set[tuple[str, str, bool]]:
    """What the matches show: colour, origin, and whether they lie at the query."""
    matches = [match for result in answer["results"] for match in result["matches"]]
    return {(match["metadata"]["colour"], match["origin"], match["raw_score"] < 0.5) for match in matches}


@pytest.mark.parametrize("where", [{}, {"filter": {"field": "colour", "eq": "red"}}], ids=["all", "filtered"])
def test_what_is_shown_is_what_was_compared(served: Any, red: str, where: dict[str, Any]) -> None:
    def ask() -> dict[str, Any]:
        answer: dict[str, Any] = served.http.post(f"{red}/query", json={**RED, **where, "k": 5}).json()
        return answer

    before = ask()
    with behind(served, red):
        meanwhile = ask()
    served.runtime.replica.refresh(served.runtime.replica.find(red.rpartition("/")[2]).id)
    after = ask()

    assert ingest_answer(before) == ingest_answer(meanwhile) == {("red", "supplied", True)}
    assert after["seq"] - 5 == meanwhile["seq"] == before["seq"]
    assert ingest_answer(after) == (set() if where else {("blue", "encoded", False)})


def test_deleted_items_are_shown_as_long_as_they_are_found(served: Any, red: str) -> None:
    with behind(served, red, "i1", "i2"):
        answer = served.http.post(f"{red}/query", json={**RED, "k": 5}).json()
    assert len(answer["results"][0]["matches"]) == sum(answer["mix"].values()) == 5


def test_a_stored_item_asks_as_what_it_is_in_the_gallery_that_answers(served: Any, red: str) -> None:
    answers: list[Any] = []
    body = {"items": ["i0"], "k": 4, **RED}
    with behind(served, red):
        asking = threading.Thread(target=lambda: answers.append(served.http.post(f"{red}/query", json=body).json()))
        asking.start()
        asking.join(0.1)  # it waits for the replica, or has answered by now
    asking.join()

    (answer,) = answers
    embedding, item = ({m["raw_score"] < 0.5 for m in result["matches"]} for result in answer["results"])
    assert {match["metadata"]["colour"] for result in answer["results"] for match in result["matches"]} == {"blue"}
    assert (embedding, item) == ({False}, {True})
