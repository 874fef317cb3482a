"""Other databases, whose clients are fakes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from index.errors import InvalidArgument
from regraft.sources.base import Wanted, display_address
from regraft.sources.opening import open_source
from staging.external.fake_databases import FAKES, ROWS, FakeChroma, FakeLance, FakeMilvus, FakeQdrant
from staging.external.source_rows import check, read


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("kind", FAKES)
def test_another_database_gives_all_its_rows(kind: str) -> None:
    check(open_source(f"{kind}:somewhere#things", Wanted()), [{"n": n} for n in range(10)])


@pytest.mark.usefixtures("faked")
def test_the_texts_of_rows_are_a_field_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    about: list[dict[str, Any]] = [{"body": "a", "n": 1}, {"body": None}, {"n": 2}, {"body": "d"}]
    vectors = [[1.0, 2.0], None, [3.0, 4.0], None]
    points = [SimpleNamespace(id=n, vector=vectors[n], payload=one) for n, one in enumerate(about)]
    monkeypatch.setattr(FakeQdrant, "points", points)

    (batch,) = open_source("qdrant:somewhere#y", Wanted(text="body")).batches(10)

    assert (batch.ids, batch.texts, batch.columns[0].rows.tolist()) == (["0", "2", "3"], ["a", None, "d"], [0, 1])
    assert (batch.metadata, batch.skipped) == ([{"n": 1}, {"n": 2}, None], {"no vector": 1})
    for name, told in (("boby", "none of the first 4 rows has a field 'boby'.*: body"), ("n", "not int")):
        with pytest.raises(InvalidArgument, match=told):
            list(open_source("qdrant:somewhere#y", Wanted(text=name)).batches(10))


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("kind", FAKES)
def test_an_import_is_not_taken_up_from_another_place_and_no_secret_is_kept(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = open_source(f"{kind}:somewhere#things", Wanted()).identity
    monkeypatch.chdir("below")

    assert here != open_source(f"{kind}:somewhere#things", Wanted()).identity
    assert here == open_source(f"{kind}:{tmp_path}/somewhere#things", Wanted()).identity
    assert display_address("https://me:secret@host:1/path?api_key=secret") == "https://host:1/path"


@pytest.mark.usefixtures("faked")
def test_named_vectors_of_qdrant_are_columns_and_what_a_point_lacks_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[dict[str, Any]] = [
        {"b": [1.0, 2.0, 3.0]},
        {"a": [1.0, 2.0, 3.0], "b": [1.0, 2.0, 3.0]},
        {"a": [1.0, 2.0], "b": [4.0, 5.0, 6.0]},
        {"a": [[1.0, 2.0], [3.0, 4.0]]},
        {},
        {"a": [3.0, 4.0]},
        {"a": [5.0, 6.0]},
    ]
    points = [SimpleNamespace(id=n, vector=one, payload={"key": f"k{n}"}) for n, one in enumerate(held)]
    points[5].payload["key"] = None
    monkeypatch.setattr(FakeQdrant, "points", points)
    monkeypatch.setattr(FakeQdrant, "vectors", {"a": None, "b": None})

    both = Wanted(id="key", vectors={"a": "v1", "b": "v2"})
    (batch,) = open_source("qdrant:somewhere#y", both).batches(10)
    (first, *_) = open_source("qdrant:somewhere#y", Wanted()).batches(3)

    assert (batch.read, batch.ids) == (7, ["k0", "k1", "k2", "k6"])
    assert batch.skipped == {"no id": 1, "no vector": 1, "a vector of another length": 2}
    assert [(c.version, c.rows.tolist(), c.vectors.tolist()) for c in batch.columns] == [
        ("v1", [2, 3], [[1.0, 2.0], [5.0, 6.0]]),
        ("v2", [0, 1, 2], [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    ]
    assert (first.ids, first.columns[0].vectors.tolist()) == (["1"], [[1.0, 2.0, 3.0]])
    with pytest.raises(InvalidArgument, match="no vector 'c', only: a, b"):
        open_source("qdrant:somewhere#y", Wanted(vectors={"c": None}))


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("kind", ["qdrant", "lancedb", "milvus"])
def test_a_field_of_ids_that_no_row_has_is_refused(kind: str) -> None:
    with pytest.raises(InvalidArgument, match=r"none of the first 3 rows has a field 'nofield'; fields: .*n"):
        next(open_source(f"{kind}:somewhere#things", Wanted(id="nofield")).batches(3))


@pytest.mark.usefixtures("faked")
def test_a_field_of_metadata_that_a_database_does_not_have_is_refused_before_a_row_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in ("lancedb", "milvus"):
        with pytest.raises(InvalidArgument, match="things has no field 'citty', only: id, vector, n"):
            open_source(f"{kind}:somewhere#things", Wanted(metadata=["n", "citty"]))
    monkeypatch.setattr(FakeMilvus, "about", {"enable_dynamic_field": True})
    for kind in ("qdrant", "chroma", "milvus"):  # whose rows may have other fields than all rows before
        assert next(open_source(f"{kind}:somewhere#things", Wanted(metadata=["n", "m"])).batches(3)).metadata[1] == {
            "n": 1
        }


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize(
    ("kind", "unit", "space", "told"),
    [
        ("qdrant", False, "cosine", ""),
        ("qdrant", False, "l2", "things compares vectors by Cosine, but v1 has space l2.*--space cosine"),
        ("chroma", False, "l2", ""),
        ("chroma", False, "cosine", "by l2, but v1 has space cosine.*--space l2"),
        ("milvus", False, "cosine", "by IP, but v1 has space cosine"),
        ("milvus", True, "cosine", ""),
        ("milvus", False, "lorentz", ""),
        ("lancedb", False, "cosine", ""),  # says nothing of it
    ],
)
def test_vectors_that_would_be_ordered_otherwise_are_refused(
    kind: str, unit: bool, space: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if unit:
        rows = np.eye(10, 4, dtype=np.float32) + np.eye(10, 4, -4) + np.eye(10, 4, -8)
        monkeypatch.setattr("staging.external.fake_databases.ROWS", rows)
    source = open_source(f"{kind}:somewhere#things", Wanted(version="v1"), space_of={"v1": space}.__getitem__)

    if told:
        with pytest.raises(InvalidArgument, match=told):
            next(source.batches(3))
    else:
        assert sum(batch.read for batch in source.batches(3)) == 10


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("kind", ["lancedb", "milvus"])
def test_a_field_of_vectors_that_a_database_does_not_have_is_refused_before_a_row_is_read(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match="things has no vector 'vectr', only: vector"):
        open_source(f"{kind}:somewhere#things", Wanted(vectors={"vectr": "v1"}))
    vectors = {"first": pa.list_(pa.float32(), 4), "second": pa.list_(pa.float16(), 4)}
    monkeypatch.setattr(FakeLance, "schema", pa.schema({"id": pa.int64(), "tags": pa.list_(pa.string()), **vectors}))
    fields = {"id": "INT64", "tags": "ARRAY", "first": "FLOAT_VECTOR", "second": "SPARSE_FLOAT_VECTOR"}
    monkeypatch.setattr(FakeMilvus, "fields", fields)
    with pytest.raises(InvalidArgument, match="things has no vector 'vector', only: first, second"):
        open_source(f"{kind}:somewhere#things", Wanted())


def test_the_only_field_of_vectors_needs_no_name() -> None:
    assert Wanted(version="v1").vector_of(["emb"], "things") == ("emb", "v1")
    assert Wanted(version="v1").vector_of(["emb", "vector"], "things") == ("vector", "v1")


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("kind", ["lancedb", "milvus"])
def test_another_field_of_vectors_is_metadata_only_if_asked_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = {"vector": pa.list_(pa.float32(), 4), "n": pa.list_(pa.float16(), 4)}
    monkeypatch.setattr(FakeLance, "schema", pa.schema({"id": pa.int64(), **vectors}))
    monkeypatch.setattr(FakeMilvus, "fields", {"id": "INT64", "vector": "FLOAT_VECTOR", "n": "FLOAT16_VECTOR"})

    assert read(open_source(f"{kind}:somewhere#things", Wanted()))[2] == [None] * 10
    assert read(open_source(f"{kind}:somewhere#things", Wanted(metadata=["n"])))[2][1] == {"n": 1}


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("kind", ["chroma", "lancedb", "milvus"])
def test_a_second_column_of_vectors_is_refused_where_one_is_read(kind: str) -> None:
    with pytest.raises(InvalidArgument, match="--update-only"):
        next(open_source(f"{kind}:somewhere#things", Wanted(vectors={"vector": "v1", "other": "v2"})).batches(3))


@pytest.mark.usefixtures("faked")
def test_fields_of_an_object_become_metadata_if_it_is_flattened(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        {"page_content": "x", "metadata": {"source": "a", "page_content": "of its own", "no": None, "in": {"n": 1}}},
        {"page_content": "y", "metadata": "no object", "more": {"source": "b"}},
        {"page_content": "z", "metadata": None},
    ]
    points = [SimpleNamespace(id=n, vector=ROWS[n].tolist(), payload=payload) for n, payload in enumerate(told)]
    monkeypatch.setattr(FakeQdrant, "points", points)

    def flattened(*names: str, metadata: Any = None) -> Any:
        wanted = Wanted(text="page_content", flatten=names, metadata=metadata)
        return read(open_source("qdrant:somewhere#things", wanted))[2]

    nested = {"source": "a", "page_content": "of its own", "in": {"n": 1}}
    assert flattened("metadata") == [nested, {"metadata": "no object", "more": {"source": "b"}}, {}]
    assert flattened("metadata", "more") == [nested, {"metadata": "no object", "source": "b"}, {}]
    assert flattened("metadata", metadata=[]) == [nested, {"metadata": "no object"}, {}]
    with pytest.raises(
        InvalidArgument, match="none of the first 3 rows has an object in 'meta'; objects: metadata, mo"
    ):
        flattened("meta")
    with pytest.raises(InvalidArgument, match="none of the first 3 rows has an object in 'page_content'"):
        flattened("page_content")
    for kind in ("lancedb", "milvus"):
        with pytest.raises(InvalidArgument, match="things has no field 'meta', only: id, vector, n"):
            open_source(f"{kind}:somewhere#things", Wanted(flatten=["meta"]))


@pytest.mark.usefixtures("faked")
def test_a_record_without_a_document_keeps_a_field_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [{"ids": ["a"], "embeddings": ROWS[:1], "metadatas": [{"document": "x.pdf"}], "documents": [None]}]
    monkeypatch.setattr(FakeChroma, "get", lambda *_, **__: pages.pop() if pages else {"ids": []})

    assert read(open_source("chroma:somewhere#things", Wanted()))[2] == [{"document": "x.pdf"}]
