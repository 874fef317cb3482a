"""What an engine costs beside FAISS, on the same vectors: rows stored per second, recall, and how long a query takes.

    python benchmarks/engines.py [ROWS]

Of clusters of unit vectors of 128 numbers, k = 10, one query at a time, as a shard answers them: `RemoteShard` over a
collection, beside a shard in memory. PostgreSQL is pip's, on a Unix socket and without fsync. Milvus is milvus-lite, a
double for tests that compares all rows in Python: its times say nothing of Milvus, and it is left out beyond 5,000
rows.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from index.engines.base import Shard
from index.engines.config import IndexConfig, IndexKind
from index.engines.digest import digests
from index.engines.flat import FlatShard
from index.engines.milvus import MilvusEngine
from index.engines.pgvector import PgvectorEngine
from index.engines.remote import Engine, Entries, Metric
from index.engines.remote_shard import RemoteShard
from index.space import Cosine, Vectors

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "library"))
from staging.milvus import MilvusTestServer
from staging.postgres import Server

DIM, CLUSTERS, QUERIES, K = 128, 200, 300, 10
MOST_LITE = 5_000
SPACE = Cosine()


def main(rows: str = "5000") -> None:
    vectors_ND, queries_QD = made(int(rows))
    right_QK = None
    print("| vectors lie in | rows/s stored | recall@10 | query p50 ms | p99 ms |\n| --- | --- | --- | --- | --- |")
    for name, store in STORES.items():
        if name.startswith("milvus-lite") and len(vectors_ND) > MOST_LITE:
            continue
        with store(vectors_ND) as (shard, seconds):
            times, found = [], []
            for query_D in queries_QD:
                started = time.perf_counter()
                found.append(shard.search(query_D[None], K).slots_QK[0])
                times.append(1000 * (time.perf_counter() - started))
        found_QK = np.array(found)
        right_QK = found_QK if right_QK is None else right_QK
        recall = np.mean([len(set(a) & set(b)) / K for a, b in zip(found_QK.tolist(), right_QK.tolist(), strict=True)])
        p50, p99 = np.percentile(times, [50, 99])
        print(f"| {name} | {len(vectors_ND) / seconds:,.0f} | {recall:.3f} | {p50:.2f} | {p99:.2f} |", flush=True)


def made(rows: int) -> tuple[Vectors, Vectors]:
    """Vectors of clusters, and queries near some of them."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(CLUSTERS, DIM))
    all_ND = centres[random.integers(CLUSTERS, size=rows + QUERIES)] + 0.5 * random.normal(size=(rows + QUERIES, DIM))
    all_ND = SPACE.normalise(all_ND.astype(np.float32))
    return all_ND[:rows], all_ND[rows:]


@contextmanager
def exact(vectors_ND: Vectors) -> Iterator[tuple[Shard, float]]:
    shard, started = FlatShard(DIM, SPACE), time.perf_counter()
    shard.upsert(np.arange(len(vectors_ND)), vectors_ND)
    yield shard, time.perf_counter() - started


def elsewhere(opened: Callable[[Path], Iterator[Engine]]) -> Callable[[Vectors], Iterator[tuple[Shard, float]]]:
    @contextmanager
    def store(vectors_ND: Vectors) -> Iterator[tuple[Shard, float]]:
        with tempfile.TemporaryDirectory() as folder, contextmanager(opened)(Path(folder)) as engine:
            collection = engine.collection("bench", ("v1", "encoded"), DIM, Metric.INNER_PRODUCT)
            keys_N, digests_N, most = np.arange(len(vectors_ND)), digests(vectors_ND), collection.capabilities.max_rows
            started = time.perf_counter()
            for start in range(0, len(keys_N), most):
                part = slice(start, start + most)
                entries = Entries(keys_N[part], keys_N[part] + 1, digests_N[part])
                collection.upsert(entries, SPACE.items(vectors_ND[part]))
            seconds = time.perf_counter() - started
            collection.record(len(keys_N))
            shard = RemoteShard(DIM, SPACE, IndexConfig(kind=IndexKind.PGVECTOR), collection)
            shard.upsert(keys_N, vectors_ND)
            shard.settle(nullcontext, nullcontext, lambda slots_N: slots_N + 1)
            yield shard, seconds
            collection.drop()
            engine.close()

    return store


def pgvector(_: Path) -> Iterator[Engine]:
    server = Server()
    try:
        yield PgvectorEngine(server.create())
    finally:
        server.close()


def milvus(folder: Path) -> Iterator[Engine]:
    server = MilvusTestServer(folder / "milvus")
    try:
        yield MilvusEngine(server.uri)
    finally:
        server.stop()


STORES = {
    "memory (FAISS, exact)": exact,
    "pgvector": elsewhere(pgvector),
    "milvus-lite (a double for tests)": elsewhere(milvus),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
