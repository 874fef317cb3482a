"""Images and metadata that are stored, and those that are refused."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from index.version import Version
from regraft.connection import read
from regraft.models import IngestResult
from service.settings import Settings
from service.store.tables import embedding, item
from staging.api.ingest import blobs, ingest_answer
from staging.api.served import problem, serving

JSON = {"content-type": "application/json"}


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


def test_images_are_stored_as_given_with_their_metadata(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()

    stored = served.ingest(path, {"a": pictures[0], "b": pictures[1]}, label=3, note="né ☃")

    assert stored.json() == ingest_answer(2, seq=3, new=2)
    shown = served.http.get(f"{path}/items/a").json()
    assert shown.pop("created") > 1_700_000_000
    assert shown == {
        "id": "a",
        "metadata": {"label": 3, "note": "né ☃"},
        "active": "v1",
        "image": True,
        "text": None,
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

    assert again.json() == ingest_answer(1, seq=4, replaced=1)
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


def test_the_images_of_a_request_have_the_most_pixels_in_total_that_are_set(
    tmp_path: Path, versions: dict[str, Version], pictures: list[bytes]
) -> None:
    """A picture has 64 pixels."""
    with serving(Settings(data=tmp_path, max_request_pixels=2 * 64)) as small:
        assert small.register(versions["v1"]).status_code == 201
        path = small.gallery("v1")
        two = {"a": pictures[0], "b": pictures[1]}
        assert small.ingest(path, two).json()["stored"] == 2

        refused = problem(small.ingest(path, {"c": pictures[2], **two}), 413, "too_many_pixels", "/items/2/image")
        assert "at most 128 pixels in total" in refused["detail"]
        assert [item["id"] for item in small.http.get(f"{path}/items").json()["items"]] == ["a", "b"]

        assert small.query(path, *pictures[:2], k=1).status_code == 200
        problem(small.query(path, *pictures[:3], k=1), 413, "too_many_pixels", "/images/2")
        entries = {"entries": json.dumps([{"label": n, "image": str(n)} for n in range(3)])}
        files = [("images", (str(n), pictures[n])) for n in range(3)]
        sent = small.http.post(f"{path}/evaluations", data=entries, files=files)
        problem(sent, 413, "too_many_pixels", "/entries/2/image")


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

    problem(served.post_items(path, items, [("0", pictures[0])]), 422, "invalid_body", "/items")


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
        (r'"id": "a", "x\uD800": 1', "/x?", "unknown field"),
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
    assert read(IngestResult, answer.content).errors[0].index == 1  # a client's parser refuses halves in answers
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
    field = b'--b\r\nContent-Disposition: form-data; name="items"\r\n\r\n[]\r\n--b--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b; charset=undefined"}
    told = problem(served.http.post(url, content=field, headers=headers), 415, "unsupported_media_type")
    assert "charset=undefined" in told["detail"]


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
