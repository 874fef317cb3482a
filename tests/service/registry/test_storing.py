"""What an ingest makes of items that are there: an embedding beside the others, an image in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from service.replica.replica import Replica
from service.store.galleries.embeddings import put_embeddings
from service.store.galleries.gallery import gallery_named
from service.store.galleries.items import live_item
from staging.api.served import problem

A, B = [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]
LONG = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.fixture(scope="module", autouse=True)
def more(served: Any) -> None:
    """`lone` has an encoder and no edge; `bare` takes embeddings only, and no edge leads anywhere."""
    served.add("lone", 5, seed=9)
    served.add("bare", 4, encoder=False)


def send(served: Any, path: str, version: str, embedding: Sequence[float], name: str = "a", **more: Any) -> Any:
    params = {key: more.pop(key) for key in ("replace", "atomic") if key in more}
    body = {"version": version, "items": [{"id": name, "embedding": embedding, **more}]}
    return served.http.post(f"{path}/items", json=body, params=params)


def counts(answer: Any) -> dict[str, int]:
    return {kind: n for kind in ("new", "updated", "replaced") if (n := answer.json()[kind])}


def shown(served: Any, path: str, name: str = "a") -> tuple[str, Any, dict[str, str]]:
    """(active, metadata, version -> origin of what is held), which a replica built anew must place alike."""
    item = served.http.get(f"{path}/items/{name}").json()
    anew = Replica(served.runtime.database, served.runtime.registry, served.runtime.settings.indexes, 1)
    fresh = anew.find(path.rpartition("/")[2]).gallery.items_by_version()
    assert fresh == served.http.get(path).json()["mix"]
    assert item["active"] in fresh
    return item["active"], item["metadata"], {e["version"]: e["origin"] for e in item["embeddings"]}


def hold(served: Any, path: str, version: str, origin: str, name: str = "a") -> None:
    """Have an item hold one embedding more, as a backfill leaves it."""
    registered = served.runtime.registry.named(version)
    with served.runtime.database.write() as connection:
        row = live_item(connection, gallery_named(connection, path.rpartition("/")[2]).id, name)
        put_embeddings(
            connection, row.gallery_id, registered.id, origin, [row.id], np.ones((1, registered.card.dim), np.float32)
        )


@pytest.mark.parametrize(("current", "active"), [("v1", "v1"), ("v2", "v2")])
@pytest.mark.parametrize("order", [("v1", "v2"), ("v2", "v1")])
def test_embeddings_by_several_versions_lie_beside_each_other_and_the_rule_says_which_is_served(
    served: Any, current: str, active: str, order: tuple[str, str]
) -> None:
    path = served.gallery(current)
    vectors = {"v1": A, "v2": LONG}

    told = [send(served, path, version, vectors[version], metadata={"x": 1}) for version in order]

    assert [counts(answer) for answer in told] == [{"new": 1}, {"updated": 1}]
    assert shown(served, path) == (active, {"x": 1}, {"v1": "supplied", "v2": "supplied"})


def test_an_embedding_takes_the_place_of_the_one_by_its_version_and_metadata_stay_unless_named(served: Any) -> None:
    path = served.gallery("v1")
    send(served, path, "v1", A, metadata={"x": 1, "y": 2})

    assert counts(send(served, path, "v1", B)) == {"updated": 1}
    assert shown(served, path) == ("v1", {"x": 1, "y": 2}, {"v1": "supplied"})
    found = served.http.post(f"{path}/query", json={"embeddings": [B], "version": "v1", "k": 1}).json()
    assert found["results"][0]["matches"][0]["score"] == pytest.approx(1)

    send(served, path, "v1", B, metadata={"z": 3})
    assert shown(served, path)[1] == {"z": 3}


def test_an_embedding_leaves_the_image_and_an_image_takes_the_place_of_every_embedding(
    served: Any, pictures: list[bytes]
) -> None:
    path = served.gallery("v1")
    served.ingest(path, {"a": pictures[0]}, label=3)

    assert counts(send(served, path, "v2", LONG)) == {"updated": 1}
    assert shown(served, path) == ("v1", {"label": 3}, {"v1": "encoded", "v2": "supplied"})
    assert served.http.get(f"{path}/items/a/image").content == pictures[0]

    again = served.post_items(path, [{"id": "a", "image": "0"}], [("0", pictures[1])])
    assert counts(again) == {"replaced": 1}
    assert shown(served, path) == ("v1", {"label": 3}, {"v1": "encoded"})
    assert served.http.get(f"{path}/items/a/image").content == pictures[1]


def test_a_replacement_that_is_asked_for_leaves_nothing(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery("v1")
    served.ingest(path, {"a": pictures[0], "b": pictures[0]}, label=3)

    assert counts(send(served, path, "v2", LONG, replace=True)) == {"replaced": 1}
    assert shown(served, path) == ("v2", {}, {"v2": "supplied"})
    assert served.http.get(f"{path}/items/a/image").status_code == 404

    served.post_items(path, [{"id": "b", "image": "0"}], [("0", pictures[1])], replace=True)
    assert shown(served, path, "b")[1] == {}


def test_items_that_are_there_can_be_refused(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery("v1")
    served.ingest(path, {"a": pictures[0]}, label=3)
    served.ingest(path, {"gone": pictures[0]}, label=3)
    served.http.delete(f"{path}/items/gone")
    before = shown(served, path)
    items = [{"id": name, "image": "0"} for name in ("a", "gone", "new")]

    problem(send(served, path, "v2", LONG, replace=False), 422, "items_refused", "/items/0/id")
    problem(served.post_items(path, items[:1], [("0", pictures[1])], replace=False), 422, "items_refused")
    problem(served.post_items(path, items, [("0", pictures[1])], replace=False, atomic=True), 422, "items_refused")
    told = served.post_items(path, items, [("0", pictures[1])], replace=False)

    assert counts(told) == {"new": 2}
    assert [(e["index"], e["code"], e["pointer"]) for e in told.json()["errors"]] == [(0, "item_exists", "/items/0/id")]
    assert shown(served, path) == before
    assert served.http.get(f"{path}/items/a/image").content == pictures[0]


def test_an_embedding_out_of_reach_is_taken_beside_one_in_reach_and_never_alone(served: Any) -> None:
    path = served.gallery("v1")
    five = [1.0, 0.0, 0.0, 0.0, 1.0]
    send(served, path, "v1", A)
    bare = served.gallery("bare")
    send(served, bare, "bare", A)

    assert counts(send(served, path, "bare", B)) == {"updated": 1}
    assert shown(served, path) == ("v1", {}, {"v1": "supplied", "bare": "supplied"})
    refused = problem(send(served, path, "bare", B, "alone"), 422, "items_refused", "/items/0/embedding")
    assert refused["errors"][0]["code"] == "no_route"
    problem(send(served, path, "bare", B, replace=True), 422, "items_refused")
    # A version with an encoder is within reach of pictures, and of nothing where queries are embeddings only.
    assert counts(send(served, path, "lone", five, "alone")) == {"new": 1}
    problem(send(served, bare, "lone", five, "alone"), 422, "items_refused", "/items/0/embedding")
    assert counts(send(served, bare, "lone", five)) == {"updated": 1}
    assert served.http.get("/health/ready").json()["status"] == "ready"


def test_what_a_transform_made_of_an_embedding_goes_with_it_and_stays_when_it_is_sent_once_more(served: Any) -> None:
    path = served.gallery("v1")
    send(served, path, "v1", A)
    send(served, path, "lone", [1.0, 0.0, 0.0, 0.0, 1.0])
    hold(served, path, "v2", "transformed")

    send(served, path, "v1", A)
    assert set(shown(served, path)[2]) == {"v1", "v2", "lone"}
    send(served, path, "bare", A)
    assert set(shown(served, path)[2]) == {"v1", "v2", "lone", "bare"}
    send(served, path, "v1", B)
    assert shown(served, path) == ("v1", {}, {"v1": "supplied", "lone": "supplied", "bare": "supplied"})
