"""How long queries wait while their own gallery is written, sealed, at rest, compacted and saved as a snapshot.

    python benchmarks/background.py --items 100000

Writes ITEMS clustered unit vectors of 128 numbers to a real service by arrays, at full speed. One client, in a separate
process, sends one embedding at a time without a pause. `sealing`: from the first item until no index was built for some
seconds. `at rest`: nothing is written. `compaction`: two fifths of the items get other vectors, so that the rest of
their segments is rebuilt. `snapshot`: a fifth gets other metadata, until the snapshot of the gallery is written.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from clustered_gallery import DIM, about
from command_line import run_main
from index_speed import draw
from million import BLOCK, fill, register_both, search, wait_until_sealed
from real_service import client, served

from index.engines.memory.segments import SEAL_ROWS

REST_SECONDS, QUIET_SECONDS = 5.0, 5.0
MOST_SECONDS = 600.0


def main(items: Annotated[int, typer.Option(min=SEAL_ROWS)] = 100_000) -> None:
    vectors, queries = draw(items, 200, DIM)
    fifth = len(vectors) // 5
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (url, _), client(url) as http:
        register_both(http, Path(folder))
        http.post("/galleries", json={"name": "g"}).raise_for_status()
        http.post("/galleries/g/deployments", json={"version": "v1"}).raise_for_status()
        fill(http, vectors[:1], "v1")
        print("| queries during | seconds | queries | p50 ms | p99 ms | longest ms |\n|" + " --- |" * 6)
        mine, asker = multiprocessing.Pipe()
        asking = multiprocessing.get_context("spawn").Process(target=ask, args=(url, queries, asker))
        asking.start()
        mine.recv()
        log = Path(folder) / "log"

        def during(what: str, work: Any) -> None:
            mine.send(what)
            started = time.perf_counter()
            work()
            mine.send(None)
            took = np.array(mine.recv()) * 1e3
            figures = " | ".join(f"{ms:.1f}" for ms in (*np.percentile(took, (50, 99)), took.max()))
            print(f"| {what} | {time.perf_counter() - started:.1f} | {len(took)} | {figures} |", flush=True)

        def sealing() -> None:
            fill(http, vectors, "v1")
            wait_until_sealed(http, queries)
            wait_for(log, "indexed", QUIET_SECONDS)

        def compaction() -> None:
            known = log.read_text().count("indexed")
            fill(http, -vectors[: 2 * fifth], "v1")
            wait_for(log, "indexed", QUIET_SECONDS, known)

        def written_down() -> None:
            kept = log.read_text().count("snapshot_kept")
            describe(http, vectors[-fifth:], len(vectors) - fifth)
            wait_for(log, "snapshot_kept", 0, kept)

        during("sealing", sealing)
        during("at rest", lambda: time.sleep(REST_SECONDS))
        during("compaction", compaction)
        during("snapshot", written_down)
        mine.send("")
        asking.join()


def ask(url: str, queries: Any, orders: Connection) -> None:
    """Ask between two messages, and tell what each query took; an empty message is the end."""
    with client(url) as http:
        search(http, "v1", queries[:1])
        orders.send("ready")
        while orders.recv():
            took: list[float] = []
            while not orders.poll():
                started = time.perf_counter()
                search(http, "v1", queries[len(took) % len(queries)][None])
                took.append(time.perf_counter() - started)
            orders.recv()
            orders.send(took)


def describe(http: httpx.Client, vectors: Any, first: int) -> None:
    """Other metadata with the same vectors."""
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start : start + BLOCK]
        np.save(array := io.BytesIO(), block)
        listed = [{"id": f"i{first + start + n}", "metadata": about(n) | {"new": True}} for n in range(len(block))]
        form = {"items": json.dumps(listed), "version": "v1"}
        http.post("/galleries/g/items", data=form, files={"embeddings": ("e", array.getvalue())}).raise_for_status()


def wait_for(log: Path, event: str, quiet: float, known: int = 0) -> None:
    """Until the service's log tells of something more often than is known, and not again for so many seconds."""
    until, told, since = time.monotonic() + MOST_SECONDS, known, time.monotonic()
    while time.monotonic() < until:
        if (now := log.read_text().count(event)) != told:
            told, since = now, time.monotonic()
        if told > known and time.monotonic() - since >= quiet:
            return
        time.sleep(0.2)
    sys.exit(f"no {event!r} within {MOST_SECONDS:.0f} s")


if __name__ == "__main__":
    run_main(main)
