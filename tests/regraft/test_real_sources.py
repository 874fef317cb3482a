"""Databases that run in a folder, read by their own clients: those of them that are installed here.

Of these only Qdrant's is in the environment of `make test`: the others are large. `pip install
'.[from-chroma,from-lancedb,from-milvus]'` brings them.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regraft.sources.base import ItemSource, Wanted
from regraft.sources.opening import open_source

COUNT = 25
ROWS = np.random.default_rng(0).normal(size=(COUNT, 4)).astype(np.float32)


def said(number: int) -> str | None:
    """The text of a row; some have none."""
    return f"text {number}" if number % 4 else None


def qdrant(folder: Path) -> str:
    models = pytest.importorskip("qdrant_client.models", reason="regraft[from-qdrant] is not installed")
    from qdrant_client import QdrantClient

    client = QdrantClient(path=str(folder))
    client.create_collection("things", models.VectorParams(size=4, distance=models.Distance.DOT))
    told = [{"n": n, "body": said(n)} for n in range(COUNT)]
    points = [models.PointStruct(id=n, vector=ROWS[n].tolist(), payload=told[n]) for n in range(COUNT)]
    client.upsert("things", points)
    client.close()
    return f"qdrant:{folder}#things"


def chroma(folder: Path) -> str:
    chromadb = pytest.importorskip("chromadb", reason="regraft[from-chroma] is not installed")
    collection = chromadb.PersistentClient(str(folder)).create_collection("things")
    told = [{"n": n} | ({"body": said(n)} if said(n) else {}) for n in range(COUNT)]
    collection.add([str(n) for n in range(COUNT)], ROWS, told)
    return f"chroma:{folder}#things"


def lance(folder: Path) -> str:
    lancedb = pytest.importorskip("lancedb", reason="regraft[from-lancedb] is not installed")
    rows = [{"id": n, "vector": ROWS[n], "n": n, "body": said(n)} for n in range(COUNT)]
    lancedb.connect(str(folder)).create_table("things", rows)
    return f"lancedb:{folder}#things"


def milvus(folder: Path) -> str:
    pytest.importorskip("milvus_lite", reason="regraft[from-milvus] is not installed")
    pymilvus = pytest.importorskip("pymilvus", reason="regraft[from-milvus] is not installed")
    client = pymilvus.MilvusClient(f"{folder}.db")
    client.create_collection("things", dimension=4, metric_type="IP")
    client.upsert("things", [{"id": n, "vector": ROWS[n].tolist(), "n": n, "body": said(n)} for n in range(COUNT)])
    client.release_collection("things")  # as one is that another process wrote
    client.close()
    return f"milvus:{folder}.db#things"


def rows(source: ItemSource, after: Any = None) -> dict[str, tuple[list[float], Any]]:
    return {
        key: (vector, about)
        for batch in source.batches(7, after)
        for key, vector, about in zip(batch.ids, batch.columns[0].vectors.tolist(), batch.metadata, strict=True)
    }


@pytest.mark.filterwarnings("default")  # theirs
def test_keys_of_milvus_that_hold_quotes_and_backslashes_are_gone_on_behind(tmp_path: Path) -> None:
    pytest.importorskip("milvus_lite", reason="regraft[from-milvus] is not installed")
    pymilvus = pytest.importorskip("pymilvus", reason="regraft[from-milvus] is not installed")
    keys = sorted(["a", "it's", 'b"c', "d\\e", "f\\n", "漢", "new\nline"])
    client = pymilvus.MilvusClient(f"{tmp_path}/there.db")
    client.create_collection("things", dimension=4, id_type="string", max_length=20)
    client.upsert("things", [{"id": key, "vector": ROWS[0].tolist()} for key in keys])
    client.close()
    source = open_source(f"milvus:{tmp_path}/there.db#things", Wanted())

    batches = list(islice(source.batches(1), 20))

    assert [batch.ids for batch in batches] == [[key] for key in keys]
    for n, batch in enumerate(batches):
        assert [key for rest in source.batches(3, batch.cursor) for key in rest.ids] == keys[n + 1 :]


@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("fill", [qdrant, chroma, lance, milvus])
def test_all_rows_come_whole_and_behind_any_cursor(tmp_path: Path, fill: Any) -> None:
    address = fill(tmp_path / "there")
    source = open_source(address, Wanted(metadata=["n"], text="body"))
    expected = {str(n): (ROWS[n].tolist(), {"n": n}) for n in range(COUNT)}

    assert source.count == COUNT
    assert rows(source) == expected
    seen = 0
    for batch in source.batches(7):
        seen += batch.read
        left = rows(source, json.loads(json.dumps(batch.cursor))) if seen < COUNT else {}
        assert len(left) == COUNT - seen
        assert not set(left) & set(batch.ids)
        assert batch.texts == [said(int(key)) for key in batch.ids]
