"""A gallery `asked` of clustered unit vectors with two metadata fields, which several benchmarks fill and query."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from real_service import SEALING_SECONDS, client, register

from index.engines.memory.segments import SETTLED_ROWS
from index.version import Card

DIM, K = 128, 10
BATCH = 5_000
CENTRES = 200


def clustered(items: int) -> tuple[Any, Any]:
    """Unit vectors around centres, and queries of the same kind."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CENTRES, DIM))
    made = centres[rng.integers(0, CENTRES, items + 200)] + 0.7 * rng.normal(size=(items + 200, DIM))
    made = (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)
    return made[:items], made[items:]


def about(number: int) -> dict[str, Any]:
    return {"label": number % 7, "name": f"item number {number}"}


def fill(url: str, scratch: Path, vectors: Any, index: str) -> None:
    """Store the vectors, and wait until few are scanned, unless that is the index."""
    with client(url) as http:
        register(http, scratch, Card("plain", DIM, {"kind": "cosine"}, None, method="independent"))
        http.post("/galleries", json={"name": "asked", "index": {"kind": index}}).raise_for_status()
        http.post("/galleries/asked/deployments", json={"version": "plain"}).raise_for_status()
        for start in range(0, len(vectors), BATCH):
            block = vectors[start : start + BATCH].tolist()
            listed = [
                {"id": f"i{start + n}", "metadata": about(start + n), "embedding": v} for n, v in enumerate(block)
            ]
            http.post("/galleries/asked/items", json={"items": listed}).raise_for_status()
    until = time.monotonic() + SEALING_SECONDS
    while index != "exact" and searched(url, vectors[:1])[0] >= SETTLED_ROWS and time.monotonic() < until:
        time.sleep(1)


def searched(url: str, query: Any) -> tuple[int, int]:
    """How many items a query is compared with one by one, and the effort that the service chose for the others."""
    ask = {"version": "plain", "embeddings": query.tolist(), "k": K, "explain": True}
    answer = httpx.post(f"{url}/v1/galleries/asked/query", json=ask, timeout=120, trust_env=False)
    (shard,) = answer.raise_for_status().json()["explain"]["shards"]
    return shard["scanned"]["exact"], shard["scanned"]["effort"]
