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
import os
import re
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np
from clustered_gallery import K, about, clustered, fill, searched
from command_line import Count, Seconds, run_main
from http_peers import CHROMA, chroma_of, floor_of
from load import beside, host_and_port, is_whole, load, request
from real_service import cpu_seconds, served, wait_until_at_rest

JSON = "application/json"
CONNECTIONS = (1, 8, 32)


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


def body(vector: Any, body_format: str) -> tuple[bytes, str]:
    """The body of a query, and where to: a media type and query parameters."""
    if body_format == "npy":
        import io

        np.save(file := io.BytesIO(), vector[None])
        return file.getvalue(), f"application/x-npy?version=plain&k={K}"
    asked = {"version": "plain", "embeddings": [vector.astype(float).tolist()], "k": K}
    return json.dumps(asked).encode(), JSON


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


def show(name: str, connections: int, recall: float, pid: int, url: str, asks: Sequence[bytes], seconds: float) -> None:
    asyncio.run(load(url, asks, connections, 0.5))
    before = cpu_seconds(pid)
    took = asyncio.run(load(url, asks, connections, seconds))
    spent = (cpu_seconds(pid) - before) / len(took)
    p50, p99 = np.percentile(took, [50, 99]) * 1000
    rate, cost = f"{len(took) / seconds:,.0f}", f"{1000 * spent:.2f}"
    print(f"| {name} | {connections} | {recall:.3f} | {p50:.2f} | {p99:.2f} | {rate} | {cost} |", flush=True)


if __name__ == "__main__":
    run_main(main)
