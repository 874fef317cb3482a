"""Each source gives all its rows, whole and behind any cursor; files are real, clients of other databases fakes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from index.errors import InvalidArgument
from regraft.sources.base import ItemSource, Wanted, as_json, batch_of, display_address
from regraft.sources.live import LiveSource
from regraft.sources.opening import open_source
from staging.fake_databases import FAKES, IDS, ROWS, FakeChroma, FakeMilvus, FakeQdrant


def table() -> pa.Table:
    return pa.table({"id": IDS, "v": ROWS.tolist(), "n": list(range(10)), "none": [None] * 10})


def write_parquet(path: Path) -> None:
    pq.write_table(table(), path, row_group_size=4)


def write_file(path: Path) -> None:
    with pa.ipc.new_file(path, table().schema) as file:
        file.write_table(table(), max_chunksize=4)


def write_stream(path: Path) -> None:
    with pa.ipc.new_stream(path, table().schema) as file:
        file.write_table(table(), max_chunksize=4)


def write_fvecs(path: Path) -> None:
    path.write_bytes(np.hstack([np.full((10, 1), 4, "<i4"), ROWS.view("<i4")]).tobytes())


def write_fbin(path: Path) -> None:
    path.write_bytes(np.array([10, 4], "<u4").tobytes() + ROWS.tobytes())


def write_ivf(path: Path) -> None:
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(4), 4, 2)
    index.train(ROWS)
    index.add(ROWS)
    faiss.write_index(index, str(path))


def write_mapped(path: Path) -> None:
    index = faiss.IndexIDMap(faiss.IndexFlatIP(4))
    index.add_with_ids(ROWS, np.arange(10))
    faiss.write_index(index, str(path))


FILES = {
    "a.parquet": write_parquet,
    "a.arrow": write_file,
    "b.arrow": write_stream,
    "a.npy": lambda path: np.save(path, ROWS),
    "a.fvecs": write_fvecs,
    "a.fbin": write_fbin,
    "a.faiss": write_ivf,
    "b.faiss": write_mapped,
}


@pytest.mark.parametrize("kind", ["IVF8,Flat", "RR4,IVF2,Flat", "IDMap,RR4,IVF2,Flat", "IVF2,SQfp16"])
def test_vectors_of_inverted_lists_keep_the_ids_that_they_were_added_with(tmp_path: Path, kind: str) -> None:
    ids = np.arange(10) * 7 + 10**12
    index = faiss.index_factory(4, kind)
    index.train(ROWS)
    index.add_with_ids(ROWS, ids)
    faiss.write_index(index, str(tmp_path / "a.faiss"))

    found, vectors, _, cursors = read(source := open_source(str(tmp_path / "a.faiss"), Wanted()))

    assert found == [str(one) for one in ids]
    assert np.allclose(vectors, ROWS, atol=0.02)
    assert read(source, cursors[1])[0] == found[6:]


@pytest.mark.parametrize(
    ("kind", "bytes_stored"),
    [
        ("Flat", None),
        ("HNSW4,Flat", None),
        ("IDMap,IVF2,Flat", None),
        ("SQ8", 4),
        ("IDMap,SQfp16", 8),
        ("HNSW4_SQ8", 4),
        ("PCA2,Flat", 8),
    ],
)
def test_of_an_index_that_compresses_it_is_said_that_its_vectors_are_approximations(
    tmp_path: Path, kind: str, bytes_stored: int | None
) -> None:
    index = faiss.index_factory(4, kind)
    index.train(ROWS)
    index.add_with_ids(ROWS, np.arange(10)) if kind.startswith("IDMap") else index.add(ROWS)
    faiss.write_index(index, str(tmp_path / "a.faiss"))

    source = open_source(str(tmp_path / "a.faiss"), Wanted())

    said = f"a.faiss stores {bytes_stored} bytes of each vector of 16: approximations are imported"
    assert isinstance(source, LiveSource)
    assert source.note.partition(";")[0] == ("" if bytes_stored is None else said)


@pytest.mark.parametrize("kind", ["IVF2,PQ2x4fs", "OPQ2,IVF2,PQ2x4fsr", "IVF2,RQ2x4fs_32_Nrq2x4", "IVF2,PQ2x4fs,RFlat"])
def test_vectors_of_a_fast_scan_index_are_those_it_had_before_it_was_written(tmp_path: Path, kind: str) -> None:
    rows = np.random.default_rng(0).normal(size=(640, 4)).astype(np.float32)
    index = faiss.index_factory(4, kind)
    index.train(rows)
    index.add(rows)
    faiss.write_index(index, str(tmp_path / "a.faiss"))
    if inner := faiss.try_extract_index_ivf(index):
        lists: Any = faiss.downcast_index(inner)
        lists.make_direct_map()
    script = (
        "import sys, numpy\n"
        "from regraft.sources.base import Wanted\n"
        "from regraft.sources.opening import open_source\n"
        "batches = open_source(sys.argv[1], Wanted()).batches(100)\n"
        "numpy.save(sys.argv[2], numpy.concatenate([batch.columns[0].vectors for batch in batches]))\n"
    )

    # In a process of its own, which FAISS would end with a segmentation fault.
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "a.faiss", tmp_path / "a.npy"], check=False)

    assert done.returncode == 0
    assert np.array_equal(np.load(tmp_path / "a.npy"), index.reconstruct_batch(np.arange(len(rows))))


def test_vectors_of_inverted_lists_are_given_back_where_some_were_removed(tmp_path: Path) -> None:
    write_ivf(tmp_path / "a.faiss")
    index = faiss.read_index(str(tmp_path / "a.faiss"))
    index.remove_ids(np.array([0, 4]))
    faiss.write_index(index, str(tmp_path / "a.faiss"))

    found, vectors, *_ = read(open_source(str(tmp_path / "a.faiss"), Wanted()))

    assert (found, vectors) == (list("12356789"), np.delete(ROWS, [0, 4], 0).tolist())


def read(source: ItemSource, after: Any = None) -> tuple[list[str], list[list[float]], list[Any], list[Any]]:
    batches = list(source.batches(3, after))
    vectors = [row for batch in batches for row in batch.columns[0].vectors.tolist()]
    ids = [i for batch in batches for i in batch.ids]
    metadata = [about for batch in batches for about in batch.metadata]
    return ids, vectors, metadata, [json.loads(json.dumps(batch.cursor)) for batch in batches]


def check(source: ItemSource, wanted: list[Any]) -> None:
    ids, vectors, metadata, cursors = read(source)
    assert (ids, vectors, metadata) == (IDS, ROWS.tolist(), wanted)
    assert source.count in (10, None)
    for cursor in cursors[:-1]:
        rest = read(source, cursor)
        assert rest[0] == IDS[-len(rest[0]) :]
    assert read(source, cursors[1])[0] == IDS[len(ids) - len(read(source, cursors[1])[0]) :]
    assert source.identity


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_all_its_rows_whole_and_behind_any_cursor(tmp_path: Path, name: str) -> None:
    FILES[name](tmp_path / name)
    tabular = name.endswith(("parquet", "arrow"))
    wanted = Wanted(vectors={"v": "v1"}) if tabular else Wanted(version="v1")

    source = open_source(str(tmp_path / name), wanted)

    check(source, [{"n": n} if tabular else None for n in range(10)])
    assert next(source.batches(3)).columns[0].version == "v1"


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The clients of other databases are fakes, and `somewhere` is a folder that each takes for its own."""
    for place in (tmp_path / "somewhere", tmp_path / "below" / "somewhere"):
        place.mkdir(parents=True)
        for name in ("meta.json", "chroma.sqlite3"):
            (place / name).touch()
    monkeypatch.chdir(tmp_path)
    for kind, (module, fake) in FAKES.items():
        monkeypatch.setitem(sys.modules, module, fake)
        monkeypatch.delitem(sys.modules, f"regraft.sources.{kind}", raising=False)
    yield
    for kind in FAKES:
        sys.modules.pop(f"regraft.sources.{kind}", None)


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
        monkeypatch.setattr("staging.fake_databases.ROWS", rows)
    source = open_source(f"{kind}:somewhere#things", Wanted(version="v1"), space_of={"v1": space}.__getitem__)

    if told:
        with pytest.raises(InvalidArgument, match=told):
            next(source.batches(3))
    else:
        assert sum(batch.read for batch in source.batches(3)) == 10


def test_vectors_that_faiss_would_order_otherwise_are_refused(tmp_path: Path) -> None:
    write_mapped(tmp_path / "a.faiss")
    source = open_source(str(tmp_path / "a.faiss"), Wanted(version="v1"), space_of={"v1": "cosine"}.__getitem__)

    with pytest.raises(InvalidArgument, match="compares vectors by ip, but v1 has space cosine"):
        next(source.batches(3))


@pytest.mark.parametrize("count", [9, 11])
@pytest.mark.parametrize("ending", [".txt", ".npy"])
def test_ids_that_are_more_or_fewer_than_the_rows_are_refused_before_any_is_read(
    tmp_path: Path, ending: str, count: int
) -> None:
    np.save(tmp_path / "v.npy", ROWS)
    ids = tmp_path / f"ids{ending}"
    np.save(ids, np.arange(count)) if ending == ".npy" else ids.write_text("x\n" * count)

    with pytest.raises(InvalidArgument, match=f"ids{ending} has {count} ids, v.npy 10 rows"):
        open_source(str(tmp_path / "v.npy"), Wanted(), ids=ids)


def test_ids_come_from_a_file_and_what_a_table_lacks_is_counted(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", ROWS)
    (tmp_path / "ids.txt").write_text("\n".join(f"x{n}" for n in range(10)), encoding="utf-8-sig")
    source = open_source(str(tmp_path / "v.npy"), Wanted(), ids=tmp_path / "ids.txt")
    assert read(source)[0] == [f"x{n}" for n in range(10)]
    assert read(source, 7)[0] == ["x7", "x8", "x9"]
    holes = pa.table({"id": ["d", "a", None, "c", "b"], "v": [[1], [2**24 + 1, 2], [1], None, [3, 4]]})
    pq.write_table(holes, tmp_path / "h.parquet")
    (batch,) = open_source(str(tmp_path / "h.parquet"), Wanted(vectors={"v": None})).batches(10)
    assert (batch.read, list(batch.ids), batch.columns[0].rows.tolist()) == (5, ["d", "a", "c", "b"], [1, 3])
    assert batch.columns[0].vectors.tolist() == [[2**24, 2], [3, 4]]
    assert batch.skipped == {"no id": 1, "v: a vector of another length": 1, "no vector": 1}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x.txt", "pgvector:ADDRESS"),
        ("gone.npy", "does not exist"),
        ("qdrant:somewhere", "qdrant:ADDRESS#COLLECTION"),
        ("bad.fbin", "not an .fbin file"),
        ("bad.faiss", "not a FAISS index"),
        ("bad.parquet", "bad.parquet is not a .parquet file"),
        ("bad.arrow", "bad.arrow is not a .arrow file"),
        ("qdrant:somewhere#gone", "somewhere#gone cannot be read: Collection gone not found"),
        *((f"{kind}:nowhere#things", "nothing exists at nowhere.*begin with http://") for kind in FAKES),
        ("qdrant:below#things", "no meta.json at below"),
    ],
)
@pytest.mark.usefixtures("faked")
def test_what_is_no_source_is_said_in_words_and_makes_none(source: str, told: str) -> None:
    for name in ("bad.fbin", "bad.faiss", "bad.parquet", "bad.arrow"):
        Path(name).write_bytes(bytes(range(64)))
    before = sorted(Path().rglob("*"))

    with pytest.raises(InvalidArgument, match=told):
        open_source(source, Wanted())

    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("source", "wanted", "ids", "told"),
    [
        ("a.npy", Wanted(id="key"), None, "no column of ids"),
        ("a.faiss", Wanted(id="key"), None, "no column of ids"),
        ("chroma:x#y", Wanted(id="key"), None, "no column of ids"),
        ("a.npy", Wanted(metadata=["city"]), None, "--metadata cannot be used"),
        ("a.npy", Wanted(text="body"), None, "no column of texts"),
        ("a.faiss", Wanted(), Path("ids.txt"), "--ids can only be used with"),
        ("a.parquet", Wanted(), Path("ids.txt"), "--ids can only be used with"),
    ],
)
def test_an_option_that_a_source_has_no_use_for_is_refused(
    source: str, wanted: Wanted, ids: Path | None, told: str
) -> None:
    with pytest.raises(InvalidArgument, match=told):
        open_source(source, wanted, ids=ids)


def test_values_that_json_has_no_word_for_become_some_that_it_has() -> None:
    given = {"a": np.float32(1), "b": float("nan"), "c": np.arange(2), 1: {"x": Path("p")}}

    assert as_json(given) == {"a": 1.0, "b": None, "c": [0, 1], "1": {"x": "p"}}


def test_dates_are_in_the_form_that_filters_compare_and_bytes_are_text_or_hex_digits() -> None:
    moment = datetime(2024, 1, 31, 8, tzinfo=UTC)
    given = {"a": moment, "b": moment.date(), "c": moment.time(), "d": b"x\n\xe2\x80\x8c", "e": memoryview(b"\xff\x01")}

    told = {"a": "2024-01-31T08:00:00+00:00", "b": "2024-01-31", "c": "08:00:00", "d": "x\n\u200c", "e": "ff01"}
    assert as_json(given) == told


@pytest.mark.parametrize(
    ("ids", "read_as"),
    [
        ([b"a", b"b", b"c"], ["a", "b", "c"]),
        ([b"\xff\x01", b"\xff\x00", b"a"], ["ff01", "ff00", "a"]),
        ([b"+\x0e\\2\x18EE\xec\xb4\xa6\x0e\x1a\x0bA#{"] * 3, ["2b0e5c32184545ecb4a60e1a0b41237b"] * 3),
        ([1, 2, 3], list("123")),
    ],
)
def test_ids_that_are_bytes_or_numbers_are_read_as_what_they_say(tmp_path: Path, ids: list[Any], read_as: Any) -> None:
    np.save(tmp_path / "v.npy", ROWS[:3])
    np.save(tmp_path / "ids.npy", np.array(ids))
    pq.write_table(pa.table({"id": ids, "v": ROWS[:3].tolist()}), tmp_path / "v.parquet")

    assert read(open_source(str(tmp_path / "v.npy"), Wanted(), ids=tmp_path / "ids.npy"))[0] == read_as
    assert read(open_source(str(tmp_path / "v.parquet"), Wanted(vectors={"v": None})))[0] == read_as
    np.save(tmp_path / "ids.npy", np.arange(3).reshape(3, 1))
    with pytest.raises(InvalidArgument, match="must have ids"):
        open_source(str(tmp_path / "v.npy"), Wanted(), ids=tmp_path / "ids.npy")


def test_numbers_with_gaps_are_ids_where_there_are_any(tmp_path: Path) -> None:
    """Pandas makes floats of a column of integers with gaps, and NaN of a gap."""
    pq.write_table(pa.table({"id": [1.5, float("nan"), 2.0], "v": ROWS[:3].tolist()}), tmp_path / "v.parquet")

    (batch,) = open_source(str(tmp_path / "v.parquet"), Wanted(vectors={"v": None})).batches(10)

    assert (batch.ids, batch.skipped) == (["1.5", "2.0"], {"no id": 1})
    assert batch_of([(float("nan"), [1.0], None), (7, [1.0], None)], None, 2).ids == ["7"]


def test_of_two_usual_columns_the_one_with_vectors_is_read_and_two_with_vectors_are_refused(tmp_path: Path) -> None:
    columns = {"id": IDS, "vector": ROWS.tolist()}
    pq.write_table(pa.table({**columns, "embedding": IDS}), tmp_path / "one.parquet")
    pq.write_table(pa.table({**columns, "embedding": ROWS.tolist()}), tmp_path / "two.parquet")

    named = [{"embedding": key} for key in IDS]
    assert read(open_source(str(tmp_path / "one.parquet"), Wanted()))[:3] == (IDS, ROWS.tolist(), named)
    with pytest.raises(InvalidArgument, match="vectors in embedding and vector: name one by --vector"):
        open_source(str(tmp_path / "two.parquet"), Wanted())
    assert read(open_source(str(tmp_path / "two.parquet"), Wanted(vectors={"vector": "v1"})))[1] == ROWS.tolist()


def test_an_export_of_an_empty_gallery_has_no_column_of_vectors_and_no_rows(tmp_path: Path) -> None:
    empty = pa.table({name: pa.array([], pa.string()) for name in ("id", "active", "text", "metadata")})
    pq.write_table(empty.replace_schema_metadata({"regraft": "{}"}), tmp_path / "export.parquet")
    pq.write_table(empty, tmp_path / "other.parquet")

    assert list(open_source(str(tmp_path / "export.parquet"), Wanted()).batches(10)) == []
    with pytest.raises(InvalidArgument, match="the column of vectors or texts is required"):
        open_source(str(tmp_path / "other.parquet"), Wanted())


def test_a_table_with_columns_as_an_export_has_them_needs_no_metadata_and_maps_are_objects(tmp_path: Path) -> None:
    maps = pa.array([[("k", 1)]] * 10, pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"id": IDS, "vector:v1": ROWS.tolist(), "m": maps}), tmp_path / "a.parquet")

    assert read(open_source(str(tmp_path / "a.parquet"), Wanted()))[:3] == (IDS, ROWS.tolist(), [{"m": {"k": 1}}] * 10)


def test_times_in_nanoseconds_need_no_pandas(tmp_path: Path) -> None:
    instant = 1704067200 * 10**9 + 1001
    times = {
        "at": pa.array([instant] * 10, pa.timestamp("ns")),
        "there": pa.array([instant] * 10, pa.timestamp("ns", "Europe/Zurich")),
        "day": pa.array([1001] * 10, pa.time64("ns")),
        "long": pa.array([1001] * 10, pa.duration("ns")),
    }
    pq.write_table(pa.table({"id": IDS, "v": ROWS.tolist(), **times}), tmp_path / "a.parquet", version="2.6")
    script = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pandas': raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from regraft.sources.base import Wanted\n"
        "from regraft.sources.opening import open_source\n"
        "import json\n"
        "source = open_source(sys.argv[1], Wanted(vectors={'v': 'v1'}))\n"
        "print(json.dumps([b.metadata for b in source.batches(1)][9]))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "a.parquet"], capture_output=True, text=True, check=False
    )

    assert done.stderr == ""
    told = {"at": "2024-01-01T00:00:00.000001", "there": "2024-01-01T01:00:00.000001+01:00"}
    assert json.loads(done.stdout) == [told | {"day": "00:00:00.000001", "long": "0:00:00.000001"}]
    assert next(iter(open_source(str(tmp_path / "a.parquet"), Wanted(vectors={"v": "v1"})).batches(1))).metadata == [
        json.loads(done.stdout)[0]
    ]


@pytest.mark.parametrize("name", ["w", "id", "text"])
def test_a_value_that_cannot_be_read_is_told_with_its_column(tmp_path: Path, name: str) -> None:
    wrong = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], "<i4")), pa.py_buffer(b"\xff"))
    columns = {"id": pa.array(["a"]), "v": ROWS[:1].tolist(), "text": pa.array(["b"]), name: wrong}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    pq.write_table(
        pa.table({"id": ["a"], "v": ROWS[:1].tolist(), "w": pa.array([2**30], pa.date32())}), tmp_path / "b.parquet"
    )

    with pytest.raises(InvalidArgument, match=rf"a.parquet: a value of column '{name}' cannot be read: 'utf-8'"):
        read(open_source(str(tmp_path / "a.parquet"), Wanted(vectors={"v": "v1"}, text="text")))
    with pytest.raises(InvalidArgument, match=r"b.parquet: a value of column 'w' cannot be read: .*999999999"):
        read(open_source(str(tmp_path / "b.parquet"), Wanted(vectors={"v": "v1"})))


def test_several_columns_of_one_name_are_refused_unless_they_are_left_out(tmp_path: Path) -> None:
    names = ["id", "v", "x", "x", "y"]
    same = pa.Table.from_arrays([pa.array(IDS), pa.array(ROWS.tolist()), *[pa.array(range(10))] * 3], names=names)
    pq.write_table(same, file := tmp_path / "a.parquet")

    with pytest.raises(InvalidArgument, match=r"a.parquet has several columns 'x': rename them, or leave"):
        open_source(str(file), Wanted(vectors={"v": "v1"}))
    left = open_source(str(file), Wanted(vectors={"v": "v1"}, metadata=["y"]))
    assert read(left)[:3] == (IDS, ROWS.tolist(), [{"y": n} for n in range(10)])


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("kind", ["chroma", "lancedb", "milvus"])
def test_a_second_column_of_vectors_is_refused_where_one_is_read(kind: str) -> None:
    with pytest.raises(InvalidArgument, match="--update-only"):
        next(open_source(f"{kind}:somewhere#things", Wanted(vectors={"vector": "v1", "other": "v2"})).batches(3))


@pytest.mark.usefixtures("faked")
def test_a_record_without_a_document_keeps_a_field_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [{"ids": ["a"], "embeddings": ROWS[:1], "metadatas": [{"document": "x.pdf"}], "documents": [None]}]
    monkeypatch.setattr(FakeChroma, "get", lambda *_, **__: pages.pop() if pages else {"ids": []})

    assert read(open_source("chroma:somewhere#things", Wanted()))[2] == [{"document": "x.pdf"}]


@pytest.mark.parametrize("content", [b"", b"\x01"])
@pytest.mark.parametrize("ending", [".npy", ".fvecs", ".fbin"])
def test_a_file_of_vectors_that_is_empty_or_cut_is_told_as_one(tmp_path: Path, ending: str, content: bytes) -> None:
    (tmp_path / f"cut{ending}").write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"cut{ending} is not a {ending} file"):
        open_source(str(tmp_path / f"cut{ending}"), Wanted())
