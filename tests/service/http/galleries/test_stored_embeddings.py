"""Embeddings of items that are there: a second version's are added, all are read back, and what is missing is told."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from index.version import Version
from regraft import Client
from service.http.bodies.arrow import ARROW
from service.settings import Settings
from staging.api.served import problem, serving

OLD = np.array([[1, 0, 0, 0], [0, 0.6, 0, 0.8], [0, 0, -1, 1e-30]], np.float32)
NEW = np.array([[0, 0, 0, 0, 0, 1], [0, 0, 0.6, 0.8, 0, 0]], np.float32)
"""Unit vectors, which are stored as they are."""


@pytest.fixture
def filled(served: Any) -> str:
    """Items a, b and c, by v1."""
    path: str = served.gallery()
    items = [{"id": "abc"[n], "metadata": {"n": n}, "embedding": row.tolist()} for n, row in enumerate(OLD)]
    assert served.http.post(f"{path}/items", json={"items": items}).json()["new"] == 3
    return path


def as_json(ids: str, rows: Any) -> dict[str, Any]:
    items = [{"id": i, "embedding": row.tolist()} for i, row in zip(ids, rows, strict=True)]
    return {"json": {"version": "v2", "items": items}}


def as_npy(ids: str, rows: Any) -> dict[str, Any]:
    np.save(file := io.BytesIO(), rows)
    data = {"items": json.dumps([{"id": i} for i in ids]), "version": "v2"}
    return {"data": data, "files": {"embeddings": ("e.npy", file.getvalue())}}


def as_table(ids: str, rows: Any, **columns: Any) -> dict[str, Any]:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
    table = pa.table({"id": list(ids), "embedding": vectors, **columns})
    with pa.ipc.new_stream(sink := pa.BufferOutputStream(), table.schema) as written:
        written.write_table(table)
    content = bytes(sink.getvalue())
    return {"content": content, "headers": {"content-type": ARROW}, "params": {"version": "v2"}}


def put(served: Any, path: str, body: dict[str, Any], **params: Any) -> Any:
    return served.http.put(f"{path}/items:embeddings", **{**body, "params": {**body.get("params", {}), **params}})


def held(served: Any, path: str, **params: Any) -> dict[str, dict[str, tuple[str, list[float]]]]:
    """Id -> version -> (origin, numbers)."""
    items = served.http.get(f"{path}/items:embeddings", params=params).json()["items"]
    return {i["id"]: {e["version"]: (e["origin"], e["embedding"]) for e in i["embeddings"]} for i in items}


def missing(served: Any, path: str, version: str = "v2", **params: Any) -> list[str]:
    listed = served.http.get(f"{path}/items:missing", params={"version": version, **params})
    return list(listed.json()["ids"])


@pytest.mark.parametrize("body", [as_json, as_npy, as_table])
def test_a_second_version_is_put_beside_the_first_and_unknown_ids_are_named(
    served: Any, filled: str, body: Any
) -> None:
    before = held(served, filled)
    assert missing(served, filled) == ["a", "b", "c"]

    done = put(served, filled, body("ax", NEW)).json()

    assert (done["updated"], done["new"], done["failed"]) == (1, 0, 1)
    assert [(e["index"], e["id"], e["code"], e["pointer"]) for e in done["errors"]] == [
        (1, "x", "unknown_item", "/items/1/id")
    ]
    assert held(served, filled) == before | {"a": before["a"] | {"v2": ("supplied", NEW[0].tolist())}}
    assert missing(served, filled) == ["b", "c"]
    assert served.http.get(f"{filled}/items/a").json()["metadata"] == {"n": 0}
    assert served.http.get(filled).json()["items"] == 3
    problem(put(served, filled, body("bx", NEW), atomic=True), 422, "items_refused")
    assert missing(served, filled) == ["b", "c"]


@pytest.mark.parametrize(
    ("body", "code", "pointer"),
    [
        (
            {"json": {"version": "v2", "items": [{"id": "a", "embedding": [1] * 6, "metadata": {}}]}},
            "items_refused",
            "",
        ),
        (as_table("ab", NEW, n=[1, 2]), "items_refused", ""),
        ({"json": {"version": "v2", "items": []}}, "invalid_body", "/items"),
        ({"json": {"version": "v2", "items": [{"id": "a", "embedding": [1]}]}}, "items_refused", ""),
        ({"data": {"items": "[]"}, "files": {"images": ("a", b"a")}}, "invalid_body", "/images"),
        ({"data": {"items": '[{"id": "a"}]'}, "files": {"x": b""}}, "invalid_body", "/x"),
        ({**as_json("ab", NEW), "params": {"origin": "encoded"}}, "invalid_request", "/origin"),
        ({**as_json("ab", NEW), "params": {"version": "v2"}}, "unknown_parameter", "/version"),
    ],
)
def test_what_is_no_addition_is_refused(served: Any, filled: str, body: Any, code: str, pointer: str) -> None:
    before = held(served, filled)

    refused = put(served, filled, body)

    assert (refused.status_code, refused.json()["code"]) == (422, code), refused.text
    assert not pointer or refused.json()["errors"][0]["pointer"] == pointer
    assert held(served, filled) == before


def test_what_a_transform_made_elsewhere_stays_known_as_such_and_counts_as_missing(served: Any, filled: str) -> None:
    put(served, filled, as_json("ab", NEW), origin="transformed")
    assert held(served, filled)["a"]["v2"][0] == "transformed"
    assert missing(served, filled) == ["a", "b", "c"]

    put(served, filled, as_json("a", NEW[:1]))  # the very same numbers

    assert held(served, filled)["a"]["v2"] == ("supplied", NEW[0].tolist())
    assert missing(served, filled, limit=1) == ["b"]


def test_vectors_are_read_back_page_by_page_as_json_and_as_tables_alike(served: Any, filled: str) -> None:
    put(served, filled, as_json("ab", NEW))
    name = filled.rpartition("/")[2]
    with Client(served.url) as client:
        first = client.embeddings(name, limit=2)
        second = client.embeddings(name, limit=2, cursor=first.next, versions=["v2"])
        tables = [pa.ipc.open_stream(client.embeddings_table(name, limit=2)).read_all()]
        cursor = tables[0].schema.metadata[b"next"].decode()
        tables.append(pa.ipc.open_stream(client.embeddings_table(name, limit=2, cursor=cursor)).read_all())
        assert client.embeddings(name, limit=3).next is None
        assert client.missing_items(name, version="v2").ids == ["c"]
        some = client.missing_items(name, version="plain", limit=2)
        others = client.missing_items(name, version="plain", limit=1, cursor=some.next)
        assert (some.ids, others.ids, others.next) == (["a", "b"], ["c"], None)

    assert [i.id for i in first.items] == ["a", "b"]
    assert [(e.version, e.embedding) for e in first.items[1].embeddings] == [
        ("v1", OLD[1].tolist()),
        ("v2", NEW[1].tolist()),
    ]
    assert [(i.id, i.embeddings) for i in second.items] == [("c", [])]
    assert second.next is None
    whole = pa.concat_tables(tables)
    assert whole.column("vector:v1").to_pylist() == OLD.tolist()
    assert whole.column("vector:v2").to_pylist() == [*NEW.tolist(), None]
    assert whole.column("origin:v2").to_pylist() == ["supplied", "supplied", None]
    assert [json.loads(one) for one in whole.column("metadata").to_pylist()] == [{"n": n} for n in range(3)]
    assert tables[1].schema.metadata[b"next"] == b""


@pytest.mark.parametrize(
    ("method", "route", "asked"),
    [
        ("GET", "items", {}),
        ("GET", "items/a", {}),
        ("GET", "items:embeddings?versions=v1", {}),
        ("POST", "query", {"items": ["a"]}),
    ],
)
def test_items_are_shown_that_hold_a_version_which_another_process_has_registered(
    tmp_path: Path, versions: dict[str, Version], method: str, route: str, asked: dict[str, Any]
) -> None:
    settings = Settings(data=tmp_path / "data", processes=2)
    with serving(settings) as registering, serving(settings) as other:
        assert registering.register(versions["v1"]).is_success
        path = registering.gallery("v1")
        row: dict[str, Any] = {"items": [{"id": "a", "embedding": [1, 0, 0, 0]}]}
        assert registering.http.post(f"{path}/items", json=row).is_success
        assert other.http.request(method, f"{path}/{route}", json=asked or None).status_code == 200
        assert registering.register(versions["plain"]).is_success
        row["version"] = "plain"
        row["items"][0]["embedding"].pop()
        assert registering.http.put(f"{path}/items:embeddings", json=row).is_success

        shown = other.http.request(method, f"{path}/{route}", json=asked or None)

        assert shown.status_code == 200, shown.text


def test_vectors_of_named_items_are_read_back_alone(served: Any, filled: str) -> None:
    with Client(served.url) as client:
        page = client.embeddings(filled.rpartition("/")[2], ids=["c", "nobody", "a\x00", "a"], versions=["v1"])

    assert {one.id: one.embeddings[0].embedding for one in page.items} == {"a": OLD[0].tolist(), "c": OLD[2].tolist()}
    assert page.next is None
    for wrong in ("a", '{"a": 1}', "[1]", "[" * 3000):
        problem(served.http.get(f"{filled}/items:embeddings", params={"ids": wrong}), 422, "invalid_argument", "/ids")
