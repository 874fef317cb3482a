"""A gallery of a million on one machine: ingest, sealing, queries, a kill, a restart, a deployment, a rollback.

    python benchmarks/million.py --items 1000000 --index auto --dim 128

Writes ITEMS clustered unit vectors of DIM numbers with two metadata fields to a real service by arrays. The gallery
seals and answers queries (recall against brute force) as soon as only a head is scanned, and again when nothing is left
to merge. Then the service is killed with SIGKILL, restarts and answers again. A second version with an identity edge
serves a tenth of the items after a deployment and none after the rollback, once those are sealed: how long each takes,
and the longest wait of one client that queries without a pause. `OMP_NUM_THREADS=2` builds indexes on two cores.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import faiss
import httpx
import numpy as np
from clustered_gallery import DIM, about
from command_line import Count, run_main
from index_speed import CLUSTERS
from load import load, request
from real_service import SEALING_SECONDS, client, register, resident_bytes, served, wait_until_at_rest

from index.engines.memory.segments import SEAL_ROWS
from index.version import Card, Edge, EdgeKind, Score

BLOCK, K, ASKED = 10_000, 10, 200
ASKING_SECONDS = 4.0


def main(items: Count = 1_000_000, index: Literal["auto", "hnsw", "ivf"] = "auto", dim: Count = DIM) -> None:
    vectors, queries = draw(items, ASKED, dim)
    truth = faiss.knn(queries, vectors, K, metric=faiss.METRIC_INNER_PRODUCT)[1]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        with served(scratch) as (url, pid):
            with client(url) as http:
                register_both(http, scratch, dim)
                http.post("/galleries", json={"name": "g", "index": {"kind": index}}).raise_for_status()
                http.post("/galleries/g/deployments", json={"version": "v1"}).raise_for_status()
                report("ingested", timed(lambda: fill(http, vectors, "v1")), f"{len(vectors)} x {dim} by arrays")
                report("sealed and indexed", timed(lambda: wait_until_sealed(http, queries)), "after the last write")
                ask(http, url, queries, truth)
                report("merged, too", timed(lambda: wait_until_at_rest(pid)), "nothing is left to build")
                ask(http, url, queries, truth)
                print(f"| memory | {resident_bytes(pid) / len(vectors):,.0f} bytes an item | the whole process |")
                print(
                    f"| disk | {disk_bytes(scratch / 'd') / len(vectors):,.0f} bytes an item | database and indexes |"
                )
            os.kill(pid, 9)
        started = time.perf_counter()
        with served(scratch) as (url, pid), client(url) as http:
            search(http, "v1", queries[:1])
            report("killed, started: the first answer", time.perf_counter() - started, "with Python's own start")
            ask(http, url, queries, truth)
            fill(http, vectors[: len(vectors) // 10], "v2")
            wait_until_at_rest(pid)
            with waiting(url, queries) as waits:
                for version in ("v2", "v1"):
                    body = {"version": version, "override": "measured here"}
                    go = f"/galleries/g/{'deployments' if version == 'v2' else 'rollback'}"
                    took = timed(lambda: http.post(go, json=body if version == "v2" else {}).raise_for_status())  # noqa: B023
                    report("deployment" if version == "v2" else "rollback", took, f"a tenth of the items to {version}")
                    time.sleep(2)
            p50, p99 = np.percentile(waits, (50, 99)) * 1e3
            print(
                f"| queries meanwhile | p50 {p50:.1f}, p99 {p99:.1f}, longest {max(waits) * 1e3:.1f} ms | one client |"
            )


def register_both(http: httpx.Client, scratch: Path, dim: int = DIM) -> None:
    """Two versions of embeddings only, the second one with an identity edge to the first."""
    edge = Edge("v2", "v1", EdgeKind.IDENTITY, {"cmc@1": Score(0.9, 0.8, 1.0)})
    for name, edges in (("v1", []), ("v2", [edge])):
        register(http, scratch, Card(name, dim, {"kind": "cosine"}, None, method="independent"), *edges)


def fill(http: httpx.Client, vectors: Any, version: str) -> None:
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start : start + BLOCK]
        np.save(array := io.BytesIO(), block)
        described = [{"id": f"i{start + n}", "metadata": about(start + n)} for n in range(len(block))]
        form = {"items": json.dumps(described), "version": version}
        http.post("/galleries/g/items", data=form, files={"embeddings": ("e", array.getvalue())}).raise_for_status()


def search(http: httpx.Client, version: str, queries: Any, **more: Any) -> dict[str, Any]:
    body = {"version": version, "embeddings": queries.tolist(), "k": K, **more}
    found: dict[str, Any] = http.post("/galleries/g/query", json=body).raise_for_status().json()
    return found


def wait_until_sealed(http: httpx.Client, queries: Any) -> None:
    until = time.monotonic() + SEALING_SECONDS
    while time.monotonic() < until:
        (shard,) = search(http, "v1", queries[:1], explain=True)["explain"]["shards"]
        if shard["scanned"]["exact"] < SEAL_ROWS:
            return
        time.sleep(1)
    sys.exit(f"not sealed within {SEALING_SECONDS:.0f} s")


def ask(http: httpx.Client, url: str, queries: Any, truth: Any) -> None:
    hits = 0
    for query, expected in zip(queries, truth, strict=True):
        (result,) = search(http, "v1", query[None])["results"]
        hits += len({match["id"] for match in result["matches"]} & {f"i{at}" for at in expected})
    took = asyncio.run(load(url, asks(url, queries), 1, ASKING_SECONDS))
    p50, p99 = np.percentile(took, (50, 99)) * 1e3
    recall = hits / len(queries) / K
    print(f"| a query | p50 {p50:.1f}, p99 {p99:.1f} ms | recall@10 {recall:.3f}, one client |", flush=True)


def asks(url: str, queries: Any) -> list[bytes]:
    """A request for each query, as bytes: a client's library would take longer than the search."""
    bodies = [{"version": "v1", "embeddings": [query.tolist()], "k": K} for query in queries]
    return [request(url, "/v1/galleries/g/query", json.dumps(body).encode(), "application/json") for body in bodies]


@contextmanager
def waiting(url: str, queries: Any) -> Iterator[list[float]]:
    """Seconds that each query of one client took, asked without a pause."""
    took: list[float] = []
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            took.extend(asyncio.run(load(url, asks(url, queries[:1]), 1, 0.5)))

    thread = threading.Thread(target=go_on)
    thread.start()
    time.sleep(2)
    try:
        yield took
    finally:
        over.set()
        thread.join()


def draw(count: int, asked: int, dim: int) -> tuple[Any, Any]:
    """As `index_speed.draw`, a block at a time: five million take no more memory than they are."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((CLUSTERS, dim), np.float32)

    def around(many: int) -> Any:
        made = np.empty((many, dim), np.float32)
        for start in range(0, many, BLOCK):
            noise = 0.5 * random.standard_normal((min(BLOCK, many - start), dim), np.float32)
            block = centres[random.integers(0, CLUSTERS, len(noise))] + noise
            made[start : start + len(block)] = block / np.linalg.norm(block, axis=1, keepdims=True)
        return made

    return around(count), around(asked)


def timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def report(what: str, seconds: float, about_it: str) -> None:
    shown = f"{seconds:.1f} s" if seconds > 2 else f"{seconds * 1e3:.0f} ms"
    print(f"| {what} | {shown} | {about_it} |", flush=True)


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    run_main(main)
