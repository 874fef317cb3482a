from __future__ import annotations

import io
import json
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select

import service.http.ingest
from index.version import Version
from service.settings import Settings
from service.store.tables import embedding, item
from staging.served import problem, serving

JSON = {"content-type": "application/json"}


def blobs(served: Any) -> set[str]:
    return {p.name for p in (Path(served.runtime.settings.data) / "blobs").rglob("*") if p.is_file()}


def state(served: Any, path: str) -> tuple[Any, Any, int]:
    """What a refused request must not change."""
    with served.runtime.database.lookup() as connection:
        rows = connection.execute(select(func.count()).select_from(item)).scalar_one()
        rows += connection.execute(select(func.count()).select_from(embedding)).scalar_one()
    return served.http.get(path).json(), blobs(served), rows


def bomb() -> bytes:
    """A PNG that says it has 100,000 x 100,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def one_pixel() -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.new("L", (1, 1)).save(stream, "PNG")
    return stream.getvalue()


def told(stored: int, seq: int, **counts: int) -> dict[str, Any]:
    """The answer to a batch without an error."""
    counted = {"stored": stored, "new": 0, "updated": 0, "replaced": 0, **counts, "failed": 0}
    return {**counted, "seq": seq, "errors": [], "warnings": []}


# Images


def test_images_are_stored_as_given_with_their_metadata(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()

    stored = served.ingest(path, {"a": pictures[0], "b": pictures[1]}, label=3, note="né ☃")

    assert stored.json() == told(2, seq=3, new=2)
    shown = served.http.get(f"{path}/items/a").json()
    assert shown.pop("created") > 1_700_000_000
    assert shown == {
        "id": "a",
        "metadata": {"label": 3, "note": "né ☃"},
        "active": "v1",
        "image": True,
        "seq": 2,
        "embeddings": [{"version": "v1", "origin": "encoded"}],
    }
    image = served.http.get(f"{path}/items/b/image")
    assert image.content == pictures[1]
    assert image.headers["content-type"] == "image/png"
    assert image.headers["x-content-type-options"] == "nosniff"
    assert served.http.get(path).json()["mix"] == {"v1": 2}


def test_an_item_replaces_the_one_of_its_id_with_all_it_had(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    served.ingest(path, {"a": pictures[0], "b": pictures[1]}, label=0)
    before = blobs(served)

    again = served.ingest(path, {"a": pictures[2]}, label=2)

    assert again.json() == told(1, seq=4, replaced=1)
    assert served.http.get(path).json()["mix"] == {"v1": 2}
    assert served.http.get(f"{path}/items/a").json()["metadata"] == {"label": 2}
    assert served.http.get(f"{path}/items/a/image").content == pictures[2]
    assert len(blobs(served)) == len(before)
    best = served.query(path, pictures[2], k=1).json()["results"][0]["matches"][0]
    assert (best["id"], best["metadata"]) == ("a", {"label": 2})
    assert best["score"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("image", "told"),
    [
        (b"", "empty"),
        (b"text", "not a readable image"),
        (b"%PDF-1.7 ...", "not a readable image"),
        (one_pixel(), "1 x 1"),
        (bomb(), "pixels"),
    ],
    ids=["empty", "text", "pdf", "one pixel", "bomb"],
)
def test_a_bad_image_is_named_by_its_index_and_the_rest_is_stored(
    served: Any, pictures: list[bytes], image: bytes, told: str
) -> None:
    path = served.gallery()

    stored = served.ingest(path, {"a": pictures[0], "bad": image, "c": pictures[2]}).json()

    assert (stored["stored"], stored["failed"]) == (2, 1)
    (error,) = stored["errors"]
    assert told in error.pop("detail")
    assert error == {"index": 1, "id": "bad", "code": "invalid_image", "pointer": "/items/1/image"}
    assert served.http.get(f"{path}/items/bad").status_code == 404
    assert [i["id"] for i in served.http.get(f"{path}/items").json()["items"]] == ["a", "c"]
    assert served.query(path, pictures[2], k=2).json()["results"][0]["matches"][0]["id"] == "c"


def test_images_have_the_largest_size_that_is_set(
    tmp_path: Path, versions: dict[str, Version], pictures: list[bytes]
) -> None:
    """A picture has 64 pixels."""
    with serving(Settings(data=tmp_path, max_image_pixels=63)) as small:
        assert small.register(versions["v1"]).status_code == 201
        path = small.gallery()
        items = {"items": [{"id": "a", "embedding": [1, 0, 0, 0]}]}
        assert small.http.post(f"{path}/items", json=items).json()["stored"] == 1

        refused = problem(small.ingest(path, {"b": pictures[0]}), 422, "items_refused", "/items/0/image")
        assert "at most 63 pixels" in refused["errors"][0]["detail"]
        problem(small.query(path, pictures[0], k=1), 422, "invalid_image", "/images/0")
        entries = {"entries": json.dumps([{"label": n, "image": "0"} for n in range(2)])}
        files = [("images", ("0", pictures[0]))]
        problem(small.http.post(f"{path}/evaluations", data=entries, files=files), 422, "invalid_image")


def test_a_truncated_image_is_bad(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()

    refused = problem(served.ingest(path, {"a": pictures[0][:-30]}), 422, "items_refused", "/items/0/image")

    assert refused["errors"][0]["code"] == "invalid_image"


def test_an_atomic_batch_with_a_bad_item_stores_nothing(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    served.ingest(path, {"a": pictures[0]})
    before = state(served, path)
    items = [{"id": n, "image": n} for n in "abc"]

    refused = served.post_items(path, items, [("a", pictures[5]), ("b", b"no"), ("c", pictures[1])], atomic=True)

    assert [e["index"] for e in problem(refused, 422, "items_refused", "/items/1/image")["errors"]] == [1]
    assert before == state(served, path)
    assert served.post_items(path, items[:1], [("a", pictures[5])], atomic=True).json()["stored"] == 1


def test_of_a_duplicate_id_the_first_counts(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    items = [{"id": "a", "image": "0"}, {"id": "a", "image": "1"}, {"id": "b", "image": "1"}, {"id": "a", "image": "1"}]

    stored = served.post_items(path, items, [("0", pictures[0]), ("1", pictures[1])]).json()

    assert stored["stored"] == 2
    assert [(e["index"], e["code"], e["pointer"]) for e in stored["errors"]] == [
        (1, "duplicate_id", "/items/1/id"),
        (3, "duplicate_id", "/items/3/id"),
    ]
    assert served.http.get(f"{path}/items/a/image").content == pictures[0]


@pytest.mark.parametrize(
    ("bad", "pointer"),
    [
        ({"image": "0"}, "/items/0/id"),
        ({"id": "", "image": "0"}, "/items/0/id"),
        ({"id": 7, "image": "0"}, "/items/0/id"),
        ({"id": "a" * 257, "image": "0"}, "/items/0/id"),
        ({"id": "a\nb", "image": "0"}, "/items/0/id"),
        ({"id": "a\tb", "image": "0"}, "/items/0/id"),
        ({"id": "a\u2028b", "image": "0"}, "/items/0/id"),
        ({"id": "a\u0000", "image": "0"}, "/items/0/id"),
        ({"id": "a", "image": "0", "metadata": []}, "/items/0/metadata"),
        ({"id": "a", "image": "0", "metadata": None}, "/items/0/metadata"),
        ({"id": "a", "image": "0", "label": 1}, "/items/0/label"),
        ({"id": "a"}, "/items/0/image"),
        ({"id": "a", "image": "2"}, "/items/0/image"),
        ({"id": "a", "image": None}, "/items/0/image"),
        ({"id": "a", "image": ["0"]}, "/items/0/image"),
        ({"id": "a", "embedding": [1, 2, 3, 4]}, "/items/0/embedding"),
        ("a", "/items/0"),
        (None, "/items/0"),
    ],
    ids=str,
)
def test_a_badly_described_item_is_named_by_its_field(
    served: Any, pictures: list[bytes], bad: Any, pointer: str
) -> None:
    path = served.gallery()
    before = state(served, path)
    files = [("0", pictures[0]), ("1", pictures[1])]

    problem(served.post_items(path, [bad], files), 422, "items_refused", pointer)

    assert before == state(served, path)
    mixed = served.post_items(path, [bad, {"id": "good", "image": "1"}], files).json()
    assert (mixed["stored"], [e["pointer"] for e in mixed["errors"]]) == (1, [pointer])


@pytest.mark.parametrize(
    "items",
    [
        "",
        "[",
        "{}",
        "[]",
        "null",
        '"a"',
        '[{"id": "a", "image": "0", "metadata": {"x": NaN}}]',
        "[" * 20_000,
    ],
)
def test_what_is_no_list_of_items_is_refused(served: Any, pictures: list[bytes], items: str) -> None:
    path = served.gallery()

    problem(served.post_items(path, items, [("0", pictures[0])]), 422, "invalid_body")


DEEPEST = '{"a": [' * 16 + "1" + "]}" * 16
"""32 levels."""


@pytest.mark.parametrize("content", ["image", "embedding"])
@pytest.mark.parametrize(
    ("described", "pointer", "told"),
    [
        ('"id": "a", "metadata": {"x": 1e999}', "/metadata", "finite"),
        (f'"id": "a", "metadata": {{"a": {DEEPEST}}}', "/metadata", "32 deep"),
        (f'"id": "a", "metadata": {{"a": {"[" * 250}1{"]" * 250}}}', "/metadata", "32 deep"),
        (f'"id": "a", "metadata": {{"a": "{"é" * 32_764}xx"}}', "/metadata", "65538 bytes"),
        (r'"id": "a", "metadata": {"a": ["\uD800"]}', "/metadata", "surrogate"),
        (r'"id": "a", "metadata": {"\udc00": 1}', "/metadata", "surrogate"),
        (r'"id": "a\uD800"', "/id", "surrogate"),
        (r'"id": "a", "x\uD800": 1', "/x\ud800", "unknown field"),
    ],
    ids=["infinite", "33 levels", "251 levels", "size", "surrogate", "surrogate field", "surrogate id", "unknown"],
)
def test_metadata_that_could_not_be_sent_back_costs_its_own_item_only(
    served: Any, pictures: list[bytes], content: str, described: str, pointer: str, told: str
) -> None:
    path = served.gallery()
    value = '"0"' if content == "image" else "[1, 2, 3, 4]"
    good = [f'{{"id": "{i}", "metadata": {about}, "{content}": {value}}}' for i, about in (("b", DEEPEST), ("c", "{}"))]
    items = f'[{good[0]}, {{{described}, "{content}": {value}}}, {good[1]}]'
    if content == "image":
        answer = served.post_items(path, items, [("0", pictures[0])])
    else:
        answer = served.http.post(f"{path}/items", content=f'{{"items": {items}}}', headers=JSON)

    (error,) = answer.json()["errors"]
    assert (answer.json()["stored"], error["index"], error["pointer"]) == (2, 1, f"/items/1{pointer}")
    assert told in error["detail"]
    found = served.http.post(f"{path}/query", json={"items": ["c"], "k": 2}).json()["results"][0]["matches"]
    assert [match["metadata"] for match in found] == [json.loads(DEEPEST)]
    assert len(served.http.get(f"{path}/items").json()["items"]) == 2


def test_metadata_may_be_as_large_as_the_setting_says(served: Any) -> None:
    path = served.gallery()
    largest = {"a": "x" * ((64 << 10) - len('{"a":""}'))}

    stored = served.http.post(f"{path}/items", json={"items": [{"id": "a", "metadata": largest, "embedding": [1] * 4}]})

    assert stored.json()["stored"] == 1
    assert served.http.get(f"{path}/items/a").json()["metadata"] == largest


def test_the_form_is_checked(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    url, items, image = f"{path}/items", '[{"id": "a", "image": "0"}]', ("images", ("0", pictures[0]))

    problem(served.http.post(url, files=[image]), 422, "invalid_body", "/items")
    problem(served.http.post(url, data={"items": items, "k": "1"}, files=[image]), 422, "invalid_body", "/k")
    problem(served.http.post(url, data={"items": [items, items]}, files=[image]), 422, "invalid_body", "/items")
    problem(served.http.post(url, data={"items": items}, files=[image, image]), 422, "invalid_body", "/images")
    problem(served.http.post(url, files=[image, ("items", ("i.json", b"[]"))]), 422, "invalid_body", "/items")
    problem(served.http.post(url, data={"items": items, "images": "x"}, files=[image]), 422, "invalid_body", "/images")
    headers = {"content-type": "multipart/form-data"}
    problem(served.http.post(url, content=b"x", headers=headers), 422, "invalid_body")
    headers = {"content-type": "multipart/form-data; boundary=b"}
    problem(served.http.post(url, content=b"--b\r\nrubbish", headers=headers), 422, "invalid_body")


def test_a_batch_has_a_largest_size(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    many = [{"id": f"{n}", "image": "0"} for n in range(101)]

    problem(served.post_items(path, many, [("0", pictures[0])]), 413, "body_too_large", "/items")
    files = [(f"{n}", pictures[0]) for n in range(101)]
    problem(served.post_items(path, many[:1], files), 413, "body_too_large", "/images")
    assert served.post_items(path, many[:100], [("0", pictures[0])]).json()["stored"] == 100


def test_without_a_current_version_nothing_can_be_stored(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery(None)

    problem(served.ingest(path, {"a": pictures[0]}), 409, "no_current_version")
    one = {"items": [{"id": "a", "embedding": [1, 2, 3, 4]}]}
    problem(served.http.post(f"{path}/items", json=one), 409, "no_current_version")


def test_a_version_without_encoder_takes_no_images(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery("plain")

    problem(served.ingest(path, {"a": pictures[0]}), 409, "no_encoder")


# Embeddings


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
        ([1, 2, 3], "4 numbers"),
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


def test_a_batch_encoded_while_another_version_was_deployed_is_encoded_again(
    served: Any, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = served.gallery("v1")
    store = service.http.ingest._store
    seen: list[str] = []

    def deploy_first(runtime: Any, gallery_id: int, current: Any, *rest: Any) -> Any:
        if not seen:
            deployed = served.http.post(f"{path}/deployments", json={"version": "v2"})
            assert deployed.status_code == 201, deployed.text
        seen.append(current.name)
        return store(runtime, gallery_id, current, *rest)

    monkeypatch.setattr(service.http.ingest, "_store", deploy_first)
    count = len(blobs(served))

    assert served.ingest(path, {"a": pictures[0]}).json()["stored"] == 1

    assert seen == ["v1", "v2"]
    assert served.http.get(path).json()["mix"] == {"v2": 1}
    assert len(blobs(served)) == count + 1


# Reading and deleting


def test_pages_show_every_item_once(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    ids = [f"i{n}" for n in range(7)]
    served.ingest(path, dict.fromkeys(ids, pictures[0]))
    served.http.delete(f"{path}/items/i3")

    seen, cursor = [], ""
    for _ in range(3):
        page = served.http.get(f"{path}/items", params={"limit": 2, "cursor": cursor}).json()
        seen += [i["id"] for i in page["items"]]
        cursor = page["next"]

    assert seen == ["i0", "i1", "i2", "i4", "i5", "i6"]
    assert cursor is None


@pytest.mark.parametrize(
    "name", ["a/b", "a/image", "image", "ü ☃", "a%2Fb", "?x=#y", "a" * 256, ".a", "a\u00a0b\u200b", "a..b", "..."]
)
def test_any_legal_id_can_be_read_and_deleted(served: Any, pictures: list[bytes], name: str) -> None:
    from urllib.parse import quote

    path = served.gallery()
    served.ingest(path, {name: pictures[0], "other": pictures[1]})
    url = f"{served.http.base_url}{path[1:]}/items/{quote(name, safe='')}"

    assert served.http.get(url).json()["id"] == name
    assert served.http.get(f"{url}/image").content == pictures[0]
    assert served.http.delete(url).status_code == 204
    assert served.http.get(url).status_code == 404
    assert served.http.get(f"{path}/items/other").status_code == 200


def test_a_deleted_item_is_gone_at_once_with_all_it_had(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    served.ingest(path, {"a": pictures[0], "b": pictures[1]})
    images = len(blobs(served))

    assert served.http.delete(f"{path}/items/a").status_code == 204

    problem(served.http.get(f"{path}/items/a"), 404, "unknown_item")
    problem(served.http.get(f"{path}/items/a/image"), 404, "unknown_item")
    problem(served.http.delete(f"{path}/items/a"), 404, "unknown_item")
    assert served.http.get(path).json()["mix"] == {"v1": 1}
    assert [m["id"] for m in served.query(path, pictures[0], k=1).json()["results"][0]["matches"]] == ["b"]
    assert len(blobs(served)) == images - 1


def test_many_are_deleted_at_once_and_the_unknown_named(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    served.ingest(path, dict.fromkeys("abcd", pictures[0]))

    deleted = served.http.post(f"{path}/items:delete", json={"ids": ["a", "x", "c", "a"]})

    assert deleted.json() == {"deleted": 2, "missing": ["x"]}
    assert [i["id"] for i in served.http.get(f"{path}/items").json()["items"]] == ["b", "d"]
    problem(served.http.post(f"{path}/items:delete", json={"ids": []}), 422, "invalid_argument", "/ids")
    unlikely = ["a\0", "a\n", ""]
    assert served.http.post(f"{path}/items:delete", json={"ids": unlikely}).json()["missing"] == unlikely
    problem(served.http.get(f"{path}/items/a%00"), 404, "unknown_item")
    problem(served.http.post(f"{path}/items:delete", json={"ids": [1]}), 422, "invalid_request", "/ids/0")
    problem(served.http.post(f"{path}/items:delete", json={"ids": ["a"] * 101}), 413, "body_too_large", "/ids")


def test_a_deleted_id_can_be_stored_again(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    served.ingest(path, {"a": pictures[0]}, label=0)
    served.http.delete(f"{path}/items/a")

    served.ingest(path, {"a": pictures[1]}, label=1)

    assert served.http.get(f"{path}/items/a").json()["metadata"] == {"label": 1}
    assert served.http.get(path).json() | {"created": 0} == {
        "name": path.rpartition("/")[2],
        "current": "v1",
        "items": 1,
        "mix": {"v1": 1},
        "seq": 4,
        "created": 0,
    }


def test_ingest_and_delete_from_many_clients_agree_in_the_end(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    failures: list[str] = []

    def work(number: int) -> None:
        for turn in range(6):
            stored = served.ingest(path, {f"{number}-{turn}": pictures[turn], "shared": pictures[number]}, n=number)
            gone = served.http.delete(f"{path}/items/{number}-{turn}") if turn % 2 else stored
            failures.extend(r.text for r in (stored, gone) if r.status_code >= 400)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    ids = {i["id"] for i in served.http.get(f"{path}/items").json()["items"]}
    assert ids == {"shared"} | {f"{n}-{turn}" for n in range(4) for turn in (0, 2, 4)}
    assert served.http.get(path).json()["items"] == len(ids)
    winner = served.http.get(f"{path}/items/shared").json()["metadata"]["n"]
    assert served.http.get(f"{path}/items/shared/image").content == pictures[winner]


def test_the_vector_that_is_stored_is_the_one_the_encoder_gives(
    served: Any, pictures: list[bytes], versions: dict[str, Version]
) -> None:
    from index.encoder import Encoder
    from index.image import decode_image
    from service.store.vector_codec import from_bytes

    path = served.gallery("v2")
    served.ingest(path, {str(n): picture for n, picture in enumerate(pictures)})

    with served.runtime.database.lookup() as connection:
        columns = select(item.c.external_id, embedding.c.vector).join(embedding)
        live = served.runtime.replica.find(path.rpartition("/")[2])
        rows = dict(tuple(r) for r in connection.execute(columns.where(item.c.gallery_id == live.id)))
    stored = from_bytes([rows[str(n)] for n in range(20)], 6)
    expected = Encoder(versions["v2"]).encode([decode_image(picture) for picture in pictures]).vectors
    np.testing.assert_allclose(stored, expected, atol=1e-6)
