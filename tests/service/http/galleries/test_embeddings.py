"""Embeddings that are stored as supplied, and those that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from index.version import Version
from service.store.tables import embedding, item
from staging.api.served import problem


def test_embeddings_are_stored_as_supplied(served: Any) -> None:
    path = served.gallery("plain")
    items = [{"id": "a", "embedding": [1, 2, 3], "metadata": {"x": 1}}, {"id": "b", "embedding": [0, 0, 0]}]

    assert served.http.post(f"{path}/items", json={"items": items}).json()["stored"] == 2

    shown = served.http.get(f"{path}/items/a").json()
    assert (shown["image"], shown["embeddings"]) == (False, [{"version": "plain", "origin": "supplied"}])
    problem(served.http.get(f"{path}/items/a/image"), 404, "no_image")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([1, 2, 3], "by 'v1' must be a list of 4 numbers"),
        ([1, 2, 3, 4, 5], "4 numbers"),
        ([], "4 numbers"),
        ([[1, 2, 3, 4]], "4 numbers"),
        ([1, 2, 3, "4"], "4 numbers"),
        ([1, 2, 3, None], "4 numbers"),
        ([1, 2, 3, [4]], "4 numbers"),
        ([1, 2, 3, {}], "4 numbers"),
        ([True, False, True, True], "4 numbers"),
        ("1234", "4 numbers"),
        (None, "4 numbers"),
        ({"0": 1}, "4 numbers"),
        ([1, 2, 3, 1e39], "finite"),
        ([1, 2, 3, 10**400], "4 numbers"),
        ([0, 0, 0, 0], "all-zero"),
        ([0.0, 0, -0.0, 1e-30], "all-zero"),
    ],
    ids=str,
)
def test_a_bad_embedding_is_named_by_its_index_and_the_rest_is_stored(served: Any, value: Any, told: str) -> None:
    path = served.gallery()
    good = [{"id": "a", "embedding": [1, 2, 3, 4]}, {"id": "c", "embedding": [4, 3, 2, 1]}]
    items = [good[0], {"id": "bad", "embedding": value}, good[1]]

    stored = served.http.post(f"{path}/items", json={"items": items}).json()

    assert (stored["stored"], stored["failed"]) == (2, 1)
    (error,) = stored["errors"]
    assert (error["index"], error["id"], error["code"]) == (1, "bad", "invalid_vector")
    assert error["pointer"] == "/items/1/embedding"
    assert told in error["detail"]
    assert served.http.get(path).json()["items"] == 2
    alone = served.http.post(f"{path}/items?atomic=true", json={"items": items})
    problem(alone, 422, "items_refused", "/items/1/embedding")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_json_has_no_nan_and_no_infinity(served: Any, number: str) -> None:
    path = served.gallery()
    headers = {"content-type": "application/json"}

    body = '{"items": [{"id": "a", "embedding": [1, 2, 3, %s]}]}' % number  # noqa: UP031
    detail = problem(served.http.post(f"{path}/items", content=body, headers=headers), 422, "invalid_body")["detail"]
    assert number in detail
    overflowing = body.replace(number, "1e999")
    refused = served.http.post(f"{path}/items", content=overflowing, headers=headers)
    problem(refused, 422, "items_refused", "/items/0/embedding")


def test_a_vector_too_long_for_its_space_is_bad(served: Any) -> None:
    path = served.gallery("plain")

    refused = served.http.post(f"{path}/items", json={"items": [{"id": "a", "embedding": [1e30, 0, 0]}]})

    problem(refused, 422, "items_refused", "/items/0/embedding")


@pytest.mark.parametrize(
    ("body", "code", "pointer"),
    [
        ({}, "invalid_body", "/items"),
        ({"items": []}, "invalid_body", "/items"),
        ({"items": {}}, "invalid_body", "/items"),
        ([], "invalid_body", None),
        ({"items": [{}], "k": 1}, "invalid_body", "/k"),
        ({"items": [{"id": "a", "image": "x"}]}, "items_refused", "/items/0/image"),
        ({"items": [{"id": "a"}]}, "items_refused", "/items/0/embedding"),
        ({"items": [{"id": "a", "embedding": [1, 2, 3, 4]}], "version": 7}, "invalid_body", "/version"),
        ({"items": [{"id": "a", "embedding": [1, 2, 3, 4]}], "version": None}, "invalid_body", "/version"),
    ],
    ids=str,
)
def test_a_bad_body_names_its_field(served: Any, body: Any, code: str, pointer: str | None) -> None:
    path = served.gallery()

    problem(served.http.post(f"{path}/items", json=body), 422, code, pointer)


def test_embeddings_may_be_of_another_version_that_can_be_reached(served: Any) -> None:
    path = served.gallery("v2")

    def send(version: str, embedding: list[float]) -> Any:
        body = {"version": version, "items": [{"id": version, "embedding": embedding}]}
        return served.http.post(f"{path}/items", json=body)

    assert send("v1", [1, 2, 3, 4]).json()["stored"] == 1
    assert served.http.get(path).json()["mix"] == {"v1": 1}
    refused = problem(send("plain", [1, 2, 3]), 422, "items_refused", "/items/0/embedding")
    assert refused["errors"][0]["code"] == "no_route"
    problem(send("v9", [1, 2, 3]), 404, "unknown_version", "/version")


def test_the_vector_that_is_stored_is_the_one_the_encoder_gives(
    served: Any, pictures: list[bytes], versions: dict[str, Version]
) -> None:
    from index.encoders.encoder import Encoder
    from index.encoders.image import decode_image
    from service.store.vectors.codec import from_bytes

    path = served.gallery("v2")
    served.ingest(path, {str(n): picture for n, picture in enumerate(pictures)})

    with served.runtime.database.lookup() as connection:
        columns = select(item.c.external_id, embedding.c.vector).join(embedding)
        loaded = served.runtime.replica.find(path.rpartition("/")[2])
        rows = dict(tuple(r) for r in connection.execute(columns.where(item.c.gallery_id == loaded.id)))
    stored = from_bytes([rows[str(n)] for n in range(20)], 6)
    expected = Encoder(versions["v2"]).encode([decode_image(picture) for picture in pictures]).vectors
    np.testing.assert_allclose(stored, expected, atol=1e-6)


def test_metadata_of_a_batch_are_checked_one_by_one_where_they_must_be(served: Any) -> None:
    path = served.gallery()
    kept = [{"n": 10**30}, {"t": "},{"}, {"t": "ä\u0000", "x": None}, {"deep": [{"er": [1.5, True]}]}, {}]
    metadata = [*kept, {"t": "},{" * 30_000}, {"t": "x" * 70_000}]
    items = [{"id": str(n), "metadata": one, "embedding": [1, 2, 3, 4]} for n, one in enumerate(metadata)]

    stored = served.http.post(f"{path}/items", json={"items": items}).json()

    assert [(e["index"], e["pointer"]) for e in stored["errors"]] == [(n, f"/items/{n}/metadata") for n in (5, 6)]
    assert [served.http.get(f"{path}/items/{n}").json()["metadata"] for n in range(5)] == kept
    found = served.http.post(f"{path}/query", json={"version": "v1", "embeddings": [[1, 2, 3, 4]]}).json()
    assert {m["id"]: m["metadata"] for m in found["results"][0]["matches"]} == {str(n): m for n, m in enumerate(kept)}
