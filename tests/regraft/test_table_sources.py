"""Parquet and Arrow tables: which columns are read, and as what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from index.errors import InvalidArgument
from regraft.sources.base import Wanted, batch_of
from regraft.sources.opening import open_source
from staging.external.fake_databases import IDS, ROWS
from staging.external.source_rows import read


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


def test_fields_of_an_object_become_metadata_if_it_is_flattened(tmp_path: Path) -> None:
    columns = {
        "id": IDS,
        "embedding": ROWS.tolist(),
        "n": list(range(10)),
        "meta": [{"a": {"b": n}} for n in range(10)],
    }
    pq.write_table(pa.table(columns), file := tmp_path / "rows.parquet")

    def flattened(*names: str, metadata: list[str] | None = None) -> object:
        return read(open_source(str(file), Wanted(flatten=names, metadata=metadata)))[2][7]

    assert flattened() == {"n": 7, "meta": {"a": {"b": 7}}}
    assert flattened("meta") == {"n": 7, "a": {"b": 7}}
    assert flattened("meta", metadata=[]) == {"a": {"b": 7}}
    with pytest.raises(InvalidArgument, match="has no column 'mta', only: id, embedding, n, meta"):
        flattened("mta")
    with pytest.raises(InvalidArgument, match="none of the first 3 rows has an object in 'n'; objects: meta"):
        flattened("n")
