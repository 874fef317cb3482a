"""FAISS indexes: vectors and ids as they were added, whatever the index keeps of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from regraft.sources.base import Wanted
from regraft.sources.database import DatabaseSource
from regraft.sources.opening import open_source
from staging.external.fake_databases import ROWS
from staging.external.source_rows import read


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
    assert isinstance(source, DatabaseSource)
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
    index = faiss.index_factory(4, "IVF2,Flat")
    index.train(ROWS)
    index.add(ROWS)
    index.remove_ids(np.array([0, 4]))
    faiss.write_index(index, str(tmp_path / "a.faiss"))

    found, vectors, *_ = read(open_source(str(tmp_path / "a.faiss"), Wanted()))

    assert (found, vectors) == (list("12356789"), np.delete(ROWS, [0, 4], 0).tolist())
