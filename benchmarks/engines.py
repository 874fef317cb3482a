"""What an engine costs beside FAISS, on the same vectors, through a real service: stored, found, asked, held in memory.

    python benchmarks/engines.py [ROWS,...]

Clustered unit vectors of 128 numbers, k = 10, one query at a time, ROWS 2000, 10000 and 50000; first as the gallery
answers, then with `exact`. `stored`: from the first write until nothing more is to be done for the rows. `memory`: of
the API process, started anew, above that of one without items. PostgreSQL is pip's, on a Unix socket and without fsync,
for pgvector alone. Milvus is milvus-lite, a double for tests that compares all rows in Python: its times say nothing of
Milvus, and it is left out beyond 5,000 rows. FAISS scans up to 10,000 rows, and has a graph beyond.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss
import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "library"))

from http_speed import BATCH, DIM, K, clustered, served
from ingest import answers
from million import client, resident_bytes

from index.archive import pack_version
from index.engines.segments import SETTLED_ROWS
from index.folder import load_version, write_card
from index.version import Card
from staging.milvus import MilvusTestServer
from staging.postgres import Server

MOST_LITE = 5_000
MOST_SECONDS = 300.0
QUERIES, EXACT_QUERIES = 200, 50


def main(sizes: str = "2000,10000,50000") -> None:
    print(f"load {os.getloadavg()[0]:.1f}")
    print("| rows | vectors lie in | rows/s stored | search | recall@10 | p50 ms | p99 ms | memory, bytes a row |")
    print(f"|{' --- |' * 8}")
    for size in map(int, sizes.split(",")):
        vectors, queries = clustered(size)
        for kind in ("auto", "pgvector", "milvus"):
            if kind != "milvus" or size <= MOST_LITE:
                measure(kind, vectors, queries[:QUERIES])


def measure(kind: str, vectors: Any, queries: Any) -> None:
    right = faiss.knn(queries, vectors, K, metric=faiss.METRIC_INNER_PRODUCT)[1]
    with tempfile.TemporaryDirectory() as folder, elsewhere(kind, Path(folder)) as settings:
        os.environ.update(settings)
        scratch = Path(folder)
        with served(scratch) as (url, pid), client(url) as http:
            make(http, scratch, kind)
            nothing = resident_bytes(pid)
            began = time.perf_counter()
            for start in range(0, len(vectors), BATCH):
                block = vectors[start : start + BATCH].tolist()
                items = [{"id": f"i{start + n}", "embedding": vector} for n, vector in enumerate(block)]
                http.post("/galleries/g/items", json={"version": "v1", "items": items}).raise_for_status()
            wait_until_stored(http, kind, queries)
            stored = len(vectors) / (time.perf_counter() - began)
        with served(scratch) as (url, pid), client(url) as http:
            wait_until_stored(http, kind, queries)
            told = f"| {len(vectors)} | {kind} | {stored:,.0f}"
            for search in ("served", "exact"):
                some = queries if search == "served" else queries[:EXACT_QUERIES]
                figures = " | ".join(asked(http, some, right[: len(some)], exact=search == "exact"))
                memory = (resident_bytes(pid) - nothing) / len(vectors)
                print(f"{told} | {search} | {figures} | {memory:,.0f} |", flush=True)


@contextmanager
def elsewhere(kind: str, scratch: Path) -> Iterator[Mapping[str, str]]:
    """The setting that names a new server of this kind."""
    if kind == "pgvector":
        server = Server()
        try:
            yield {"REGRAFT_PGVECTOR_URL": server.create()}
        finally:
            server.close()
    elif kind == "milvus":
        lite = MilvusTestServer(scratch / "milvus")
        try:
            yield {"REGRAFT_MILVUS_URI": lite.uri}
        finally:
            lite.stop()
    else:
        yield {}


def make(http: httpx.Client, scratch: Path, kind: str) -> None:
    while not answers(http):
        time.sleep(0.05)
    (folder := scratch / "v1").mkdir()
    write_card(folder, Card("v1", DIM, {"kind": "cosine"}, None, method="independent"))
    pack_version(load_version(folder).folder, archive := scratch / "v1.zip")
    http.post("/versions", files={"archive": archive.read_bytes()}).raise_for_status()
    http.post("/galleries", json={"name": "g", "index": {"kind": kind}}).raise_for_status()
    http.post("/galleries/g/deployments", json={"version": "v1"}).raise_for_status()
    query(http, np.ones((1, DIM)))


def query(http: httpx.Client, queries: Any, **how: Any) -> Any:
    body = {"version": "v1", "embeddings": queries.tolist(), "k": K, **how}
    return http.post("/galleries/g/query", json=body).raise_for_status().json()


def wait_until_stored(http: httpx.Client, kind: str, queries: Any) -> None:
    """Until the rows have left memory, or are in an index as far as they are to be."""
    while not answers(http):
        time.sleep(0.05)
    most = SETTLED_ROWS if kind == "auto" else 1
    deadline = time.monotonic() + MOST_SECONDS
    while time.monotonic() < deadline:
        shards = query(http, queries[:1], explain=True)["explain"]["shards"]
        if sum(shard["scanned"]["exact"] for shard in shards) < most:
            return
        time.sleep(0.05)
    raise TimeoutError(f"{kind}: the rows are not in their place after {MOST_SECONDS:.0f} s")


def asked(http: httpx.Client, queries: Any, right: Any, *, exact: bool) -> Iterator[str]:
    """Recall and the times of queries, one at a time."""
    took, found = [], []
    for one in queries:
        began = time.perf_counter()
        answer = query(http, one[None], exact=exact)
        took.append(1000 * (time.perf_counter() - began))
        found.append({int(match["id"][1:]) for match in answer["results"][0]["matches"]})
    yield f"{np.mean([len(ids & set(best)) / K for ids, best in zip(found, right.tolist(), strict=True)]):.3f}"
    yield from (f"{ms:.1f}" for ms in np.percentile(took, (50, 99)))


if __name__ == "__main__":
    main(*sys.argv[1:])
