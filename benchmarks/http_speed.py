"""Queries of one embedding over HTTP against a floor with the least possible work: p50, p99, requests/s, CPU.

    python benchmarks/http_speed.py --items 10000 --seconds 4 --index exact --body-format json --processes 1

A gallery of ITEMS embeddings of 128 numbers, k = 10, INDEX `exact` or `auto`, in JSON or .npy. The floor is one
Starlette route that reads JSON with orjson, searches the index that Regraft would build of all rows and writes ids,
scores and metadata with orjson. Chroma's server takes part if it is installed (extra `bench`). The same client queries
all servers in turns, with 1, 8 and 32 connections for SECONDS each, on the machine that runs them: compare ratios. CPU
is per request, of all PROCESSES of the server. Last come `GET /health` alone, and beside 32 querying connections.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import faiss
import httpx
import numpy as np
from command_line import Count, Seconds, run_main
from http_peers import CHROMA, chroma_of, floor_of
from ingest import answers, free_port

from index.engines.segments import SETTLED_ROWS, SETTLED_SECONDS
from index.version import Card
from index.version_folder.archive import pack_version
from index.version_folder.folder import load_version, write_card

DIM, K = 128, 10
JSON = "application/json"
CONNECTIONS = (1, 8, 32)
BATCH = 5_000
SEALING_SECONDS = 3_600.0
RESTING_SECONDS, RESTING_SHARE = 5.0, 0.1
"""A service that takes no more than this share of a processor for so long has nothing left to build."""
CENTRES = 200


def main(
    items: Count = 10_000,
    seconds: Seconds = 4.0,
    index: Literal["exact", "auto"] = "exact",
    body_format: Literal["json", "npy"] = "json",
    processes: Count = 1,
) -> None:
    vectors, queries = clustered(items)
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch), processes) as (url, service):
        fill(url, Path(scratch), vectors, index)
        wait_until_at_rest(service)
        exact, effort = searched(url, vectors[:1])
        print(f"{exact} items are scanned, the others are indexed")
        asks = [request(url, "/v1/galleries/asked/query", *body(one, body_format)) for one in queries]
        truth = faiss.knn(queries, vectors, K, metric=faiss.METRIC_INNER_PRODUCT)[1]
        with ExitStack() as running:
            peers = {"floor": running.enter_context(floor_of(vectors, about, K, exact=index == "exact"))}
            if CHROMA.exists():
                peers["Chroma's server"] = running.enter_context(chroma_of(Path(scratch), vectors, about, K))
            asked = {
                name: (peer.pid, peer.url, [request(peer.url, peer.path, peer.body(one), JSON) for one in queries])
                for name, peer in peers.items()
            } | {"regraft": (service, url, asks)}
            found = {name: recall(where, requests, truth) for name, (_, where, requests) in asked.items()}
            print(f"{items} items, index {index} (effort {effort}), {body_format}; load {os.getloadavg()[0]:.1f}")
            print(f"| server | connections | recall@10 | p50 ms | p99 ms | requests/s | CPU ms |\n|{' --- |' * 7}")
            for connections in CONNECTIONS:
                for name, (pid, where, requests) in asked.items():
                    show(name, connections, found[name], pid, where, requests, seconds)
            health = f"GET /v1/health HTTP/1.1\r\nhost: {url.removeprefix('http://')}\r\n\r\n".encode()
            for connections in (0, CONNECTIONS[-1]):
                took = asyncio.run(beside(url, asks, connections, health, seconds))
                p50, p99 = np.percentile(took, [50, 99]) * 1000
                print(f"health beside {connections} connections: p50 {p50:.2f}, p99 {p99:.2f} ms")


def clustered(items: int) -> tuple[Any, Any]:
    """Unit vectors around centres, and queries of the same kind."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CENTRES, DIM))
    made = centres[rng.integers(0, CENTRES, items + 200)] + 0.7 * rng.normal(size=(items + 200, DIM))
    made = (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)
    return made[:items], made[items:]


@contextmanager
def served(scratch: Path, processes: int = 1) -> Iterator[tuple[str, int]]:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "regraft",
        "serve",
        "--port",
        str(port),
        "--workers",
        "0",
        "--processes",
        str(processes),
        "--data",
        str(scratch / "d"),
    ]
    log = (scratch / "log").open("w")
    service = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}", service.pid
    finally:
        service.terminate()
        service.wait()


def fill(url: str, scratch: Path, vectors: Any, index: str) -> None:
    """Store the vectors, and wait until few are scanned, unless that is the index."""
    folder = scratch / "plain"
    folder.mkdir()
    write_card(folder, Card("plain", DIM, {"kind": "cosine"}, None, method="independent"))
    pack_version(load_version(folder).folder, archive := scratch / "plain.zip")
    with httpx.Client(base_url=f"{url}/v1", timeout=120, trust_env=False) as http:
        while not answers(http):
            time.sleep(0.1)
        http.post("/versions", files={"archive": archive.read_bytes()}).raise_for_status()
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


def wait_until_at_rest(pid: int) -> None:
    """After the last write; what has settled is sealed and merged."""
    until = time.monotonic() + SEALING_SECONDS
    time.sleep(SETTLED_SECONDS)
    spent, before = math.inf, cpu_seconds(pid)
    while spent > RESTING_SHARE * RESTING_SECONDS and time.monotonic() < until:
        time.sleep(RESTING_SECONDS)
        spent, before = cpu_seconds(pid) - before, cpu_seconds(pid)


def about(number: int) -> dict[str, Any]:
    return {"label": number % 7, "name": f"item number {number}"}


def body(vector: Any, body_format: str) -> tuple[bytes, str]:
    """The body of a query, and where to: a media type and query parameters."""
    if body_format == "npy":
        import io

        np.save(file := io.BytesIO(), vector[None])
        return file.getvalue(), f"application/x-npy?version=plain&k={K}"
    asked = {"version": "plain", "embeddings": [vector.astype(float).tolist()], "k": K}
    return json.dumps(asked).encode(), JSON


def request(url: str, path: str, content: bytes, kind: str) -> bytes:
    media, _, params = kind.partition("?")
    head = f"POST {path}{'?' if params else ''}{params} HTTP/1.1\r\nhost: {url.removeprefix('http://')}\r\n"
    return f"{head}content-type: {media}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


# The client


def recall(url: str, asks: Sequence[bytes], truth: Any) -> float:
    """The share of the best items that the answers name."""
    found = []
    with socket.create_connection(host_and_port(url)) as connection:
        for ask, expected in zip(asks, truth, strict=True):
            connection.sendall(ask)
            answer = b""
            while not is_whole(answer):
                answer += connection.recv(1 << 16)
            found.append(len({*map(int, re.findall(rb'"i(\d+)"', answer))} & {*expected.tolist()}) / K)
    return float(np.mean(found))


def host_and_port(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def is_whole(answer: bytes) -> bool:
    """Whether all of an answer of HTTP is there."""
    head, separator, rest = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return bool(separator) and len(rest) >= int(length)


def show(name: str, connections: int, recall: float, pid: int, url: str, asks: Sequence[bytes], seconds: float) -> None:
    asyncio.run(load(url, asks, connections, 0.5))
    before = cpu_seconds(pid)
    took = asyncio.run(load(url, asks, connections, seconds))
    spent = (cpu_seconds(pid) - before) / len(took)
    p50, p99 = np.percentile(took, [50, 99]) * 1000
    rate, cost = f"{len(took) / seconds:,.0f}", f"{1000 * spent:.2f}"
    print(f"| {name} | {connections} | {recall:.3f} | {p50:.2f} | {p99:.2f} | {rate} | {cost} |", flush=True)


async def load(url: str, asks: Sequence[bytes], connections: int, seconds: float) -> list[float]:
    host, port = host_and_port(url)
    took: list[float] = []
    ended = time.perf_counter() + seconds
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: Client(asks, ended, took), host, port))[1] for _ in range(connections)
    ]
    await asyncio.gather(*(client.done for client in clients))
    return took


async def beside(url: str, asks: Sequence[bytes], connections: int, other: bytes, seconds: float) -> list[float]:
    """How long another request takes beside so many connections that ask."""
    loads = [load(url, asks, connections, seconds)] if connections else []
    took, *_ = await asyncio.gather(load(url, [other], 1, seconds), *loads)
    return took


class Client(asyncio.Protocol):
    """Asks, reads the answer, asks again."""

    def __init__(self, asks: Sequence[bytes], ended: float, took: list[float]) -> None:
        self._asks, self._ended, self._took = asks, ended, took
        self._number, self._data, self._left = 0, b"", -1
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not is_whole(self._data):
            return
        if not self._data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(self._data.decode()))
            return
        now = time.perf_counter()
        self._took.append(now - self._started)
        if now < self._ended:
            self._ask()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _ask(self) -> None:
        self._data, self._number = b"", (self._number + 1) % len(self._asks)
        self._started = time.perf_counter()
        self._transport.write(self._asks[self._number])


def cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [
        child for thread in Path(f"/proc/{pid}/task").glob("*/children") for child in thread.read_text().split()
    ]
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


if __name__ == "__main__":
    run_main(main)
