"""The cost of an external engine against FAISS, through a real service on the same vectors: writes, queries, memory.

    python benchmarks/engines.py --items 10000 --items 50000 --index auto --index pgvector

Clustered unit vectors of 128 numbers with two metadata fields, stored by arrays; k = 10, one query at a time, first
with the default settings of the gallery, then with `exact`. INDEX is auto (FAISS), pgvector or milvus, the latter of
5000 items at most. `stored`: from the first write until the rows need no more work. `memory`: of the API process after
a restart, above one without items. Processor time is that of the API process and, after the +, of the engine's
processes. It is valid on a busy machine, wall time is not.

PostgreSQL is pip's, on a Unix socket and without fsync, and only for pgvector. Milvus is milvus-lite, a test double
that compares all rows in Python: its times say nothing about Milvus, so it gets fewer queries. FAISS scans fewer than
10,000 rows and has a graph from there on.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import faiss
import httpx
import numpy as np
import typer
from command_line import Counts, choice_of, run_main

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "library"))

from clustered_gallery import DIM, K, clustered
from million import fill
from real_service import client, cpu_seconds, register, resident_bytes, served

from index.engines.memory.segments import SETTLED_ROWS
from index.version import Card
from staging.external.milvus import MilvusTestServer
from staging.external.postgres import Server

ITEMS = [10_000, 50_000]
KINDS = ("auto", "pgvector", "milvus")
MEASURED = ["auto", "pgvector"]
MOST_LITE = 5_000
MOST_SECONDS = 300.0
ASKED = {"milvus": (40, 10)}
"""Queries as the gallery answers, and with `exact`; of the other kinds:"""
QUERIES, EXACT_QUERIES = 200, 50


class Engine(NamedTuple):
    """A server that was started for this; `settings`: what names it, `pid`: of its first process, 0: there is none."""

    settings: dict[str, str]
    pid: int = 0

    def cpu(self) -> float:
        return cpu_seconds(self.pid) if self.pid else 0.0


def main(items: Counts = ITEMS, index: Annotated[list[str], typer.Option(parser=choice_of(KINDS))] = MEASURED) -> None:
    print(f"load {os.getloadavg()[0]:.1f}")
    columns = (
        "rows/s stored | CPU us a row | search | recall@10 | p50 ms | p99 ms | CPU ms a query | memory, bytes a row"
    )
    print(f"| rows | vectors lie in | {columns} |")
    print(f"|{' --- |' * 10}")
    for size in items:
        vectors, queries = clustered(size)
        for kind in index:
            if kind != "milvus" or size <= MOST_LITE:
                measure(kind, vectors, queries)
    print(f"load {os.getloadavg()[0]:.1f}")


def measure(kind: str, vectors: Any, queries: Any) -> None:
    truth = faiss.knn(queries, vectors, K, metric=faiss.METRIC_INNER_PRODUCT)[1]
    with tempfile.TemporaryDirectory() as folder, elsewhere(kind, Path(folder)) as engine:
        os.environ.update(engine.settings)
        scratch = Path(folder)
        with served(scratch) as (url, pid), client(url) as http:
            make(http, scratch, kind)
            nothing = resident_bytes(pid)
            began, mine, its = time.perf_counter(), cpu_seconds(pid), engine.cpu()
            fill(http, vectors, "v1")
            wait_until_stored(http, kind, queries)
            stored = len(vectors) / (time.perf_counter() - began)
            spent = both(1e6 * (cpu_seconds(pid) - mine) / len(vectors), 1e6 * (engine.cpu() - its) / len(vectors))
        with served(scratch) as (url, pid), client(url) as http:
            wait_until_stored(http, kind, queries)
            memory = (resident_bytes(pid) - nothing) / len(vectors)
            told = f"| {len(vectors)} | {kind} | {stored:,.0f} | {spent}"
            for search, count in zip(("served", "exact"), ASKED.get(kind, (QUERIES, EXACT_QUERIES)), strict=True):
                mine, its = cpu_seconds(pid), engine.cpu()
                figures = " | ".join(asked(http, queries[:count], truth[:count], exact=search == "exact"))
                each = both(1e3 * (cpu_seconds(pid) - mine) / count, 1e3 * (engine.cpu() - its) / count)
                print(f"{told} | {search} | {figures} | {each} | {memory:,.0f} |", flush=True)


def both(mine: float, its: float) -> str:
    digits = 0 if mine >= 20 else 1
    return f"{mine:,.{digits}f} + {its:,.{digits}f}"


@contextmanager
def elsewhere(kind: str, scratch: Path) -> Iterator[Engine]:
    """A new server of this kind."""
    if kind == "pgvector":
        server = Server()
        try:
            yield Engine({"REGRAFT_PGVECTOR_URL": server.create()}, server._pids()[0])  # noqa: SLF001
        finally:
            server.close()
    elif kind == "milvus":
        lite = MilvusTestServer(scratch / "milvus")
        try:
            patient = {"REGRAFT_ENGINE_SECONDS": "30"}
            assert lite._process is not None  # noqa: SLF001
            yield Engine({"REGRAFT_MILVUS_URI": lite.uri, **patient}, lite._process.pid)  # noqa: SLF001
        finally:
            lite.stop()
    else:
        yield Engine({})


def make(http: httpx.Client, scratch: Path, kind: str) -> None:
    register(http, scratch, Card("v1", DIM, {"kind": "cosine"}, None, method="independent"))
    http.post("/galleries", json={"name": "g", "index": {"kind": kind}}).raise_for_status()
    http.post("/galleries/g/deployments", json={"version": "v1"}).raise_for_status()
    query(http, np.ones((1, DIM)))


def query(http: httpx.Client, queries: Any, **how: Any) -> Any:
    body = {"version": "v1", "embeddings": queries.tolist(), "k": K, **how}
    return http.post("/galleries/g/query", json=body).raise_for_status().json()


def wait_until_stored(http: httpx.Client, kind: str, queries: Any) -> None:
    """Until the rows have left memory, or are in an index as far as they are to be."""
    most = SETTLED_ROWS if kind == "auto" else 1
    deadline = time.monotonic() + MOST_SECONDS
    while time.monotonic() < deadline:
        shards = query(http, queries[:1], explain=True)["explain"]["shards"]
        if sum(shard["scanned"]["exact"] for shard in shards) < most:
            return
        time.sleep(0.2)
    raise TimeoutError(f"{kind}: the rows are not in their place after {MOST_SECONDS:.0f} s")


def asked(http: httpx.Client, queries: Any, truth: Any, *, exact: bool) -> Iterator[str]:
    """Recall and the times of queries, one at a time."""
    took, found = [], []
    for one in queries:
        began = time.perf_counter()
        answer = query(http, one[None], exact=exact)
        took.append(1000 * (time.perf_counter() - began))
        found.append({int(match["id"][1:]) for match in answer["results"][0]["matches"]})
    yield f"{np.mean([len(ids & set(best)) / K for ids, best in zip(found, truth.tolist(), strict=True)]):.3f}"
    yield from (f"{ms:.1f}" for ms in np.percentile(took, (50, 99)))


if __name__ == "__main__":
    run_main(main)
