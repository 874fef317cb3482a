"""Tables in Arrow's format as bodies: what they say is what JSON says, and what is wrong with them harms nobody."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.errors import RegraftError
from regraft import Client
from service.http.bodies.arrow import ARROW, read_items
from staging.api.served import problem

ROWS = np.array([[1, 2, 3, 4], [4, 3, 2, 1], [1, 0, 0, 0]], np.float32)


def embedded(rows: Any = ROWS, **columns: Any) -> pa.Table:
    flat = pa.array(np.ascontiguousarray(rows).ravel())
    return pa.table({**columns, "embedding": pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])})


def stream(table: pa.Table, **options: Any) -> bytes:
    with pa.ipc.new_stream(sink := pa.BufferOutputStream(), table.schema, **options) as written:
        written.write_table(table, max_chunksize=2)
    return bytes(sink.getvalue())


def compressed(codec: str) -> bytes:
    return stream(embedded(id=list("abc")), options=pa.ipc.IpcWriteOptions(compression=codec))


def send(served: Any, path: str, body: bytes, action: str = "items", accept: str = "*/*", **params: Any) -> Any:
    headers = {"content-type": ARROW, "accept": accept}
    return served.http.post(f"{path}/{action}", content=body, headers=headers, params=params)


def test_a_query_by_images_is_answered_by_a_table_too(served: Any, pictures: list[bytes]) -> None:
    path = served.filled(pictures[:3])
    files = [("images", ("0", pictures[1]))]

    answer = served.http.post(f"{path}/query", files=files, data={"k": 2}, headers={"accept": ARROW})

    by_json = served.query(path, pictures[1], k=2).json()["results"][0]["matches"]
    assert pa.ipc.open_stream(answer.content).read_all().column("id").to_pylist() == [one["id"] for one in by_json]


def test_a_table_is_stored_and_asked_as_json_would_be(served: Any) -> None:
    path = served.gallery()
    table = embedded(id=list("abc"), n=[1, None, 3], name=["x", "ä", None], ok=[True, None, False])

    with Client(served.url) as client:
        stored = client.ingest_embeddings(path.rsplit("/", 1)[1], table, version="v1")

    assert (stored.new, stored.failed) == (3, 0)
    by_json = served.http.post(f"{path}/query", json={"version": "v1", "embeddings": ROWS.tolist(), "k": 2}).json()
    by_table = send(served, path, stream(embedded()), "query", version="v1", k=2).json()
    assert by_table["results"] == by_json["results"]
    shown = {m["id"]: m["metadata"] for result in by_json["results"] for m in result["matches"]}
    assert shown == {"a": {"n": 1, "name": "x", "ok": True}, "b": {"name": "ä"}, "c": {"n": 3, "ok": False}}
    answer = send(served, path, stream(embedded()), "query", ARROW, version="v1", k=2)
    found = pa.ipc.open_stream(answer.content).read_all()
    matches = [(n, m) for n, result in enumerate(by_json["results"]) for m in result["matches"]]
    assert found.column("query").to_pylist() == [n for n, _ in matches]
    assert [json.loads(one) for one in found.column("metadata").to_pylist()] == [m["metadata"] for _, m in matches]
    for name in ("id", "score", "raw_score", "version", "origin"):
        assert found.column(name).to_pylist() == [m[name] for _, m in matches]
    assert json.loads(found.schema.metadata[b"regraft"])["seq"] == by_json["seq"]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (b"", None),
        (b"PK" * 50, None),
        (stream(embedded(id=list("abc")))[:-150], None),
        (compressed("zstd"), None),
        (compressed("lz4"), None),
        (stream(embedded()), "/id"),
        (stream(embedded(id=[1, 2, 3])), "/id"),
        (stream(pa.table({"id": list("abc")})), "/embedding"),
        (stream(pa.table({"id": ["a"], "embedding": [[1.0, 2, 3, 4]]})), "/embedding"),
        (stream(embedded(ROWS.astype(int), id=list("abc"))), "/embedding"),
        (stream(embedded(ROWS[:, :3], id=list("abc"))), "/embedding"),
        (stream(embedded(id=list("abc"), z=pa.nulls(3))), "/z"),
        (stream(embedded(id=list("abc"), z=pa.array(list("aba")).dictionary_encode())), "/z"),
        (stream(embedded(id=list("abc"), z=[[1], [2], [3]])), "/z"),
        (stream(embedded(id=list("abc"), z=[b"a", b"b", b"c"])), "/z"),
        (stream(embedded(**{"id": list("abc"), "y/~z": pa.nulls(3)})), "/y~1~0z"),
        (stream(embedded(ROWS[:0], id=pa.array([], pa.string()))), "/items"),
    ],
)
def test_what_is_no_such_table_is_refused(served: Any, body: bytes, pointer: str | None) -> None:
    problem(send(served, served.gallery(), body), 422, "invalid_body", pointer)


def test_a_bad_row_is_named_by_its_item_and_the_rest_is_stored(served: Any) -> None:
    rows = np.vstack([ROWS, ROWS[:2]])
    rows[1] = np.nan
    table = embedded(rows, id=["a", "b", None, "a", "e"], x=[1.0, 1.0, 1.0, 1.0, np.inf])

    stored = send(served, served.gallery(), stream(table)).json()

    assert (stored["stored"], sorted(e["pointer"] for e in stored["errors"])) == (
        1,
        ["/items/1/embedding", "/items/2/id", "/items/3/id", "/items/4/metadata"],
    )


def test_parameters_belong_to_their_bodies(served: Any) -> None:
    path = served.gallery()

    named = served.http.post(f"{path}/items?version=v1", json={"items": []})
    other = send(served, path, stream(embedded(id=list("abc"))), "query", version="v1")

    problem(named, 422, "unknown_parameter", "/version")
    problem(other, 422, "invalid_body", "/id")


@pytest.mark.parametrize("action", ["items", "query"])
def test_without_pyarrow_the_answer_names_the_extra(served: Any, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = served.gallery()
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    refused = send(served, path, b"", action)

    assert "regraft[arrow]" in problem(refused, 415, "unsupported_media_type", None)["detail"]


@given(st.data())
def test_no_damaged_stream_does_harm(data: st.DataObject) -> None:
    raw = bytearray(stream(embedded(id=list("abc"), n=[1, None, 3], t=["x", "y", "zz"])))
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4)):
        raw[at] = data.draw(st.sampled_from([0, 1, 127, 128, 255]))
    try:
        items, rows = read_items(bytes(raw[: data.draw(st.integers(0, len(raw)))]), 10)
    except RegraftError:
        return
    assert len(items) == len(rows) <= 10
