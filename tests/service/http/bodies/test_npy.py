"""Arrays in NumPy's format as bodies: what they say is what JSON says, and what is wrong with them harms nobody."""

from __future__ import annotations

import io
import json
import pickle
from typing import Any

import numpy as np
import pytest

from service.errors import InvalidBody
from service.http.bodies.npy import read_npy, read_npy_labels
from staging.api.served import problem

ROWS = np.array([[1, 2, 3, 4], [4, 3, 2, 1], [1, 0, 0, 0]], np.float32)


def npy(array: Any) -> bytes:
    np.save(file := io.BytesIO(), array)
    return file.getvalue()


def headed(header: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    width = 4 if version == b"\x02\x00" else 2
    return b"\x93NUMPY" + version + len(header).to_bytes(width, "little") + header.encode() + body


def shaped(shape: str, kind: str = "<f4", body: bytes = bytes(16)) -> bytes:
    return headed(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n", body)


def send(served: Any, path: str, array: bytes, items: Any, **fields: Any) -> Any:
    data = {"items": json.dumps(items), **fields}
    return served.http.post(f"{path}/items", data=data, files={"embeddings": ("e.npy", array)})


def ask(served: Any, path: str, array: bytes, **params: Any) -> Any:
    headers = {"content-type": "application/x-npy"}
    return served.http.post(f"{path}/query", content=array, headers=headers, params=params)


@pytest.fixture
def filled(served: Any) -> str:
    path: str = served.gallery()
    items = [{"id": f"i{n}", "metadata": {"n": n}} for n in range(3)]
    stored = send(served, path, npy(ROWS), items)
    assert (stored.status_code, stored.json()["new"]) == (200, 3), stored.text
    return path


@pytest.mark.parametrize("kind", ["<f2", "<f4", ">f4", "<f8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_what_numpy_writes_is_read(kind: str, order: Any, version: tuple[int, int]) -> None:
    np.lib.format.write_array(file := io.BytesIO(), np.asarray(ROWS, kind, order=order), version)

    assert np.array_equal(read_npy(file.getvalue(), "/x"), ROWS)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\xff",
        npy(ROWS)[:-1],
        npy(ROWS) + b"\0",
        npy(ROWS[0]),
        npy(ROWS[None]),
        npy(ROWS.astype(int)),
        npy(np.array([[{}]], object)),
        npy(np.array([["a"]])),
        pickle.dumps(ROWS),
        shaped("(1, -4)"),
        shaped("(999999999999999, 999999999999999)"),
        shaped("(1, 4)", kind="|O"),
        shaped("(1, 4)", kind="<f4', 'x': '"),
        shaped("(1, " + "(" * 500 + "4)"),
        shaped("(1, 4)" + " " * 2000),
        headed("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 4), }", bytes(16), b"\x03\x00"),
        headed("__import__('os').abort()", bytes(16)),
        headed("{" * 900, bytes(16), b"\x02\x00"),
    ],
    ids=repr,
)
def test_what_is_no_matrix_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidBody):
        read_npy(raw, "/x")


@pytest.mark.parametrize("labels", [["a", "bß", "\U0001f600"], [1, -2], [True, False], [b"a", b"bc"]])
@pytest.mark.parametrize("order", ["<", ">"])
def test_what_numpy_writes_of_labels_is_read(labels: Any, order: str) -> None:
    array = np.array(labels)

    assert read_npy_labels(npy(array.astype(array.dtype.newbyteorder(order))), "/x").tolist() == labels


@pytest.mark.parametrize(
    "raw",
    [
        *(shaped("(2,)", kind=kind, body=bytes(16)) for kind in ("<b8", "<b2", "<i3", "<f8", "|O")),
        shaped("(4,)", kind="<U1", body=b"\xff" * 16),
        shaped("(4,)", kind=">U1", body=b"\0\x11\0\0" * 4),
    ],
    ids=repr,
)
def test_what_is_no_list_of_labels_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidBody):
        read_npy_labels(raw, "/x")


def test_an_array_asks_what_json_asks(served: Any, filled: str) -> None:
    options = {"k": 2, "explain": True, "fields": ["n"], "filter": {"field": "n", "range": {"gte": 0}}, "mode": "raw"}
    body = {"version": "v1", "embeddings": ROWS.tolist(), **options}
    params = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}

    by_json = served.http.post(f"{filled}/query", json=body).json()
    by_array = ask(served, filled, npy(ROWS), version="v1", **params).json()

    assert by_array["results"] == by_json["results"]
    assert [r["matches"][0]["id"] for r in by_array["results"]] == ["i0", "i1", "i2"]
    assert by_array["next"] == by_json["next"] is not None


@pytest.mark.parametrize(
    ("array", "params", "pointer"),
    [
        (npy(ROWS), {}, "/version"),
        (npy(ROWS), {"version": "v1", "k": "x"}, "/k"),
        (npy(ROWS), {"version": "v1", "other": "1"}, "/other"),
        (npy(ROWS[:, :2]), {"version": "v1"}, "/embeddings"),
        (npy(ROWS[:0]), {"version": "v1"}, "/embeddings"),
        (npy(np.full((2, 4), np.nan, np.float32)), {"version": "v1"}, "/embeddings/0"),
        (npy(np.full((2, 4), 1e300)), {"version": "v1"}, "/embeddings/0"),
        (npy(np.eye(2, 4, 1) * [[1], [0]]), {"version": "v1"}, "/embeddings/1"),
        (b"x", {"version": "v1"}, "/embeddings"),
    ],
)
def test_what_is_wrong_with_a_query_is_named(
    served: Any, filled: str, array: bytes, params: dict[str, str], pointer: str
) -> None:
    answer = ask(served, filled, array, **params)

    problem(answer, 422, answer.json()["code"], pointer)


def test_a_bad_row_is_named_by_its_item_and_the_rest_is_stored(served: Any) -> None:
    path = served.gallery()
    rows = ROWS.copy()
    rows[1] = np.nan

    stored = send(served, path, npy(rows), [{"id": "a"}, {"id": "b"}, {"id": "..", "metadata": {}}]).json()

    assert (stored["stored"], stored["failed"]) == (1, 2)
    assert [(e["index"], e["id"], e["pointer"]) for e in stored["errors"]] == [
        (1, "b", "/items/1/embedding"),
        (2, "..", "/items/2/id"),
    ]


@pytest.mark.parametrize(
    ("array", "items", "fields", "pointer"),
    [
        (npy(ROWS), [{"id": "a"}], {}, "/embeddings"),
        (npy(ROWS[:, :3]), [{"id": "a"}] * 3, {}, "/embeddings"),
        (b"\x93NUMPY", [{"id": "a"}], {}, "/embeddings"),
        (npy(ROWS[:1]), [{"id": "a", "embedding": [1, 2, 3, 4]}], {}, "/items/0/embedding"),
        (npy(ROWS[:1]), {}, {}, "/items"),
        (npy(ROWS[:1]), [{"id": "a"}], {"version": "none"}, "/version"),
        (npy(ROWS[:1]), [{"id": "a"}], {"other": "none"}, "/other"),
    ],
)
def test_what_is_wrong_with_an_ingest_is_named(
    served: Any, array: bytes, items: Any, fields: dict[str, str], pointer: str
) -> None:
    answer = send(served, served.gallery(), array, items, **fields)

    problem(answer, answer.status_code, answer.json()["code"], pointer)
    assert answer.status_code in {404, 422}


def test_rows_of_another_model_are_told_both_dimensions(served: Any) -> None:
    ingest = send(served, served.gallery(), npy(ROWS[:, :3]), [{"id": "a"}, {"id": "b"}, {"id": "c"}]).json()
    query = ask(served, served.gallery(), npy(ROWS[:, :3]), version="v1").json()

    assert ingest["detail"] == query["detail"] == "an embedding by 'v1' must have 4 numbers, not 3"


def test_a_form_holds_images_or_an_array(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    files = [("images", ("0", pictures[0])), ("embeddings", ("e", npy(ROWS[:1])))]

    both = served.http.post(f"{path}/items", data={"items": '[{"id": "a"}]'}, files=files)
    named = served.http.post(f"{path}/items", data={"items": '[{"id": "a"}]', "version": "v1"}, files=files[:1])

    problem(both, 422, "invalid_body", "/embeddings")
    problem(named, 422, "invalid_body", "/version")
