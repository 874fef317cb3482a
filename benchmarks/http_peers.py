"""The servers that `http_speed.py` compares with Regraft: a floor with the least possible work, and Chroma's."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import httpx
import numpy as np
from real_service import free_port

from index.engines.config import IndexConfig
from index.engines.memory.segment import Segment
from index.space import Cosine

CHROMA = Path(sys.executable).with_name("chroma")
COLLECTIONS = "/api/v2/tenants/default_tenant/databases/default_database/collections"
BATCH = 2_000
STARTING_SECONDS = 60.0

Describe = Callable[[int], dict[str, Any]]


class Peer(NamedTuple):
    """A server that holds the vectors: where, its process, and the path and body of a query of the K best."""

    url: str
    pid: int
    path: str
    body: Callable[[Any], bytes]


@contextmanager
def floor_of(vectors: Any, describe: Describe, k: int, *, exact: bool) -> Iterator[Peer]:
    """One route that reads JSON, asks the index that Regraft would build and writes JSON; `exact`: it scans."""
    port, context = free_port(), multiprocessing.get_context("spawn")
    process = context.Process(target=run_floor, args=(port, vectors, describe, exact))
    process.start()
    assert process.pid is not None

    def body(vector: Any) -> bytes:
        return json.dumps({"embeddings": [vector.astype(float).tolist()], "k": k}).encode()

    try:
        yield Peer(up(f"http://127.0.0.1:{port}", "/"), process.pid, "/", body)
    finally:
        process.terminate()
        process.join()


def run_floor(port: int, vectors: Any, describe: Describe, exact: bool) -> None:
    import orjson
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    known = [(f"i{n}", describe(n)) for n in range(len(vectors))]
    numbers = np.arange(len(vectors))
    segment = Segment(Cosine(), vectors, numbers, numbers)
    if not exact:
        segment.build_index(IndexConfig(), None, lambda: False, missed="the floor scans")
    tuned = segment.tuned

    async def ask(request: Request) -> Response:
        asked = orjson.loads(await request.body())
        query = np.asarray(asked["embeddings"], np.float32)
        if tuned is not None:
            scores, found = tuned.index.search(query, asked["k"], tuned.efforts[0])
        else:
            scores, found = faiss.knn(query, vectors, asked["k"], metric=faiss.METRIC_INNER_PRODUCT)
        matches = [
            {"id": known[at][0], "score": score, "metadata": known[at][1]}
            for at, score in zip(found[0].tolist(), scores[0].tolist(), strict=True)
        ]
        return Response(orjson.dumps({"results": [matches]}), media_type="application/json")

    uvicorn.run(Starlette(routes=[Route("/", ask, methods=["POST"])]), port=port, log_level="error", access_log=False)


@contextmanager
def chroma_of(scratch: Path, vectors: Any, describe: Describe, k: int) -> Iterator[Peer]:
    """Chroma's server, with a collection at its defaults."""
    port = free_port()
    with (scratch / "chroma.log").open("w") as log:
        command = [str(CHROMA), "run", "--path", str(scratch / "chroma"), "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = up(f"http://127.0.0.1:{port}", "/api/v2/heartbeat")
            with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
                named = {"name": "asked", "configuration": {"hnsw": {"space": "ip"}}}
                made = http.post(COLLECTIONS, json=named).raise_for_status().json()["id"]
                for start in range(0, len(vectors), BATCH):
                    at = range(start, min(start + BATCH, len(vectors)))
                    rows = vectors[start : start + BATCH].astype(float).tolist()
                    added = {"ids": [f"i{n}" for n in at], "embeddings": rows, "metadatas": [*map(describe, at)]}
                    http.post(f"{COLLECTIONS}/{made}/add", json=added).raise_for_status()

            def body(vector: Any) -> bytes:
                asked = {"n_results": k, "include": ["metadatas", "distances"]}
                return json.dumps({"query_embeddings": [vector.astype(float).tolist()], **asked}).encode()

            yield Peer(url, server.pid, f"{COLLECTIONS}/{made}/query", body)
        finally:
            server.terminate()
            server.wait()


def up(url: str, path: str) -> str:
    """The address, once something answers there."""
    until = time.monotonic() + STARTING_SECONDS
    with httpx.Client(base_url=url, timeout=5, trust_env=False) as http:
        while True:
            try:
                http.get(path)
            except httpx.TransportError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
            else:
                return url
