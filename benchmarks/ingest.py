"""How long queries of one gallery wait while another gallery receives large batches of embeddings as JSON.

    python benchmarks/ingest.py --batch-size 10000 --dim 128 --seconds 30

One service and two client processes on one machine. One client queries a gallery of 1,000 items by an embedding, again
and again; the other sends batches of BATCH_SIZE embeddings of DIM numbers (about 20 bytes each) to another gallery, one
by one, for SECONDS. The first line is without these batches. Both clients share the service's interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from command_line import Count, Seconds, run_main
from real_service import client, register, served

from index.version import Card

BEFORE_SECONDS = 5.0


def main(batch_size: Count = 10_000, dim: Count = 128, seconds: Seconds = 30.0) -> None:
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch)) as (address, _):
        fill(address, dim, Path(scratch))
        url = f"{address}/v1"
        print(f"| queries beside | queries | p50 ms | p99 ms | longest ms | batches |\n|{' --- |' * 6}")
        show("nothing", *query(url, dim, BEFORE_SECONDS, None))
        context = multiprocessing.get_context("spawn")
        sent = context.Value("i", 0)
        sender = context.Process(target=send, args=(url, batch_size, dim, seconds, sent))
        sender.start()
        while not sent.value:
            time.sleep(0.1)
        before = sent.value
        show(f"batches of {batch_size} x {dim}", *query(url, dim, seconds / 2, (sent, before)))
        sender.join()


def fill(url: str, dim: int, scratch: Path) -> None:
    with client(url) as http:
        register(http, scratch, Card("plain", dim, {"kind": "l2"}, None, method="independent"))
        for name in ("asked", "filled"):
            http.post("/galleries", json={"name": name}).raise_for_status()
            http.post(f"/galleries/{name}/deployments", json={"version": "plain"}).raise_for_status()
        http.post("/galleries/asked/items", json=batch(1000, dim)).raise_for_status()


def batch(items: int, dim: int) -> dict[str, Any]:
    vectors = np.random.default_rng(0).normal(size=(items, dim)).tolist()
    described = ({"id": f"i{n}", "metadata": {"label": n % 7}, "embedding": v} for n, v in enumerate(vectors))
    return {"items": list(described)}


def send(url: str, items: int, dim: int, seconds: float, sent: Any) -> None:
    os.nice(5)
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        request = http.build_request("POST", "/galleries/filled/items", json=batch(items, dim))
        content, kind = request.read(), {"content-type": "application/json"}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            http.post("/galleries/filled/items", content=content, headers=kind).raise_for_status()
            sent.value += 1


def query(url: str, dim: int, seconds: float, counted: tuple[Any, int] | None) -> tuple[list[float], int]:
    """Milliseconds of each query, and how many batches were sent meanwhile."""
    took = []
    asked = {"embeddings": [[0.5] * dim], "version": "plain", "k": 10}
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            started = time.perf_counter()
            http.post("/galleries/asked/query", json=asked).raise_for_status()
            took.append(1000 * (time.perf_counter() - started))
            time.sleep(0.005)
    return took, counted[0].value - counted[1] if counted else 0


def show(beside: str, took: list[float], batches: int) -> None:
    p50, p99 = np.percentile(took, [50, 99])
    print(f"| {beside} | {len(took)} | {p50:.1f} | {p99:.1f} | {max(took):.1f} | {batches} |", flush=True)


if __name__ == "__main__":
    run_main(main)
