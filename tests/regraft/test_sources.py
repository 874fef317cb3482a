"""Files as sources: each kind gives all its rows, whole and behind any cursor; others are refused in words."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from index.errors import InvalidArgument
from regraft.sources.base import Wanted, as_json
from regraft.sources.opening import open_source
from staging.external.fake_databases import FAKES, IDS, ROWS
from staging.external.source_rows import check, read


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


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_all_its_rows_whole_and_behind_any_cursor(tmp_path: Path, name: str) -> None:
    FILES[name](tmp_path / name)
    tabular = name.endswith(("parquet", "arrow"))
    wanted = Wanted(vectors={"v": "v1"}) if tabular else Wanted(version="v1")

    source = open_source(str(tmp_path / name), wanted)

    check(source, [{"n": n} if tabular else None for n in range(10)])
    assert next(source.batches(3)).columns[0].version == "v1"


def test_vectors_that_faiss_would_order_otherwise_are_refused(tmp_path: Path) -> None:
    write_mapped(tmp_path / "a.faiss")
    source = open_source(str(tmp_path / "a.faiss"), Wanted(version="v1"), space_of={"v1": "cosine"}.__getitem__)

    with pytest.raises(InvalidArgument, match="compares vectors by ip, but v1 has space cosine"):
        next(source.batches(3))


@pytest.mark.parametrize(
    ("vectors", "ids", "said"),
    [
        (
            np.array([[1, 2], [3]], object),
            np.arange(2),
            "v.npy must hold a matrix of numbers: its elements are Python o",
        ),
        (np.eye(2), np.array(["a", "b"], object), r"rows of a .npy file: its elements are Python objects \(dtype obj"),
    ],
)
def test_arrays_of_objects_are_refused_with_what_is_legal(vectors, ids, said, tmp_path):
    np.save(tmp_path / "v.npy", vectors, allow_pickle=True)
    np.save(tmp_path / "ids.npy", ids, allow_pickle=True)

    with pytest.raises(InvalidArgument, match=said):
        open_source(str(tmp_path / "v.npy"), Wanted(), ids=tmp_path / "ids.npy")


@pytest.mark.parametrize("ending", [".txt", ".npy"])
def test_a_file_of_ids_that_does_not_exist_is_refused(tmp_path: Path, ending: str) -> None:
    np.save(tmp_path / "v.npy", ROWS)

    with pytest.raises(InvalidArgument, match=f"the file .*ids{ending} does not exist") as refused:
        open_source(str(tmp_path / "v.npy"), Wanted(), ids=tmp_path / f"ids{ending}")

    assert refused.value.pointer == "/ids"


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
        ("postgresql://me:secret@h/db#t", "^postgresql://h/db must be"),
        ("pgvector:postgresql://me:secret@h/db", "^a source that begins with pgvector: must be"),
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


@pytest.mark.parametrize("size", [40, None])
def test_an_archive_of_arrays_is_no_npy_file(tmp_path: Path, size: int | None) -> None:
    np.savez(tmp_path / "several.npz", v=ROWS, w=ROWS)
    (tmp_path / "several.npy").write_bytes((tmp_path / "several.npz").read_bytes()[:size])
    np.save(tmp_path / "v.npy", ROWS)

    with pytest.raises(InvalidArgument, match=r"several\.npy is not a \.npy file"):
        open_source(str(tmp_path / "several.npy"), Wanted())
    with pytest.raises(InvalidArgument, match=r"several\.npy must have ids"):
        open_source(str(tmp_path / "v.npy"), Wanted(), ids=tmp_path / "several.npy")


@pytest.mark.parametrize("content", [b"", b"\x01"])
@pytest.mark.parametrize("ending", [".npy", ".fvecs", ".fbin"])
def test_a_file_of_vectors_that_is_empty_or_cut_is_told_as_one(tmp_path: Path, ending: str, content: bytes) -> None:
    (tmp_path / f"cut{ending}").write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"cut{ending} is not a {ending} file"):
        open_source(str(tmp_path / f"cut{ending}"), Wanted())
