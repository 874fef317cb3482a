"""What grows with a gallery, and how fast: loading it, a page of its items, planning its backfill, deleting it.

    python benchmarks/gallery_size.py --items 10000 --items 100000

ITEMS embeddings of 128 numbers, over HTTP, on a real service. While the gallery is deleted, another client writes items
to another gallery, one per request. The exponent is the slope in log-log of time over items, fitted to all sizes: 0 is
constant, 1 is proportional to the gallery. The loaded gallery has just been written.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from backfill import Server, fill, serving
from command_line import Counts, run_main
from random_versions import small, write_version
from real_service import upload
from sqlalchemy import create_engine, func, select

from service.registry.registry import Registry
from service.replica.replica import Replica
from service.settings import Settings
from service.store.database.connections import Database
from service.store.tables import gallery

ITEMS = [10_000, 100_000]
PAGES = 20


def main(items: Counts = ITEMS) -> None:
    found = [run(count) for count in items]
    print(f"| ms | {' | '.join(f'{count:,} items' for count in items)} | exponent |\n|{' --- |' * (len(items) + 2)}")
    for what in found[0]:
        took = [one[what] * 1e3 for one in found]
        print(f"| {what} | {' | '.join(f'{ms:,.1f}' for ms in took)} | {exponent(items, took)} |")


def exponent(counts: Sequence[int], took: list[float]) -> str:
    return f"{np.polyfit(np.log(counts), np.log(took), 1)[0]:.2f}" if len(counts) > 1 else "-"


def run(count: int) -> dict[str, float]:
    """Seconds of each operation on a gallery of so many items."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        v1 = write_version(root / "v1", "v1", 128, small, None)
        v2 = write_version(root / "v2", "v2", 256, small, v1)
        with serving(root) as server:
            for version in (v1, v2):
                upload(server.http, version)
            for name, many in (("g", count), ("h", 1)):
                fill(server, name, "v1", "v2", 0, many, 128)
        loading = load(server.settings)
        with serving(root) as server:
            return {"loading, processor time": loading, **measure(server)}


def load(settings: Settings) -> float:
    """Seconds of processor time for what the first query after a start reads into memory."""
    with closing(Database(settings.database_url)) as database:
        replica = Replica(database, Registry(database, settings), settings.indexes, settings.poll_seconds)
        begin = time.process_time()
        replica.start()
        replica.find("g")
        seconds = time.process_time() - begin
        replica.stop()
    return seconds


def measure(server: Server) -> dict[str, float]:
    cursor, took = "", []
    for _ in range(PAGES):
        page, seconds = timed(lambda: server.http.get("/galleries/g/items", params={"cursor": cursor}).json())  # noqa: B023
        cursor = page["next"]
        took.append(seconds)
    found = {"a page of 100 items": statistics.median(took)}
    found["a backfill planned"] = timed(lambda: server.post("/galleries/g/backfills", kind="transform"))[1]
    waits, stop = [timed(lambda: write(server))[1] for _ in range(PAGES)], threading.Event()
    found["a write into another gallery"] = statistics.median(waits)
    waits.clear()

    def go_on() -> None:
        while not stop.is_set():
            waits.append(timed(lambda: write(server))[1])

    writer = threading.Thread(target=go_on)
    writer.start()
    begin = time.perf_counter()
    deleted = timed(lambda: server.http.delete("/galleries/g", params={"confirm": "g"}))[1]
    engine = create_engine(server.settings.database_url)
    while True:
        with engine.connect() as connection:
            if connection.execute(select(func.count()).select_from(gallery)).scalar_one() == 1:
                break
        time.sleep(0.05)
    found |= {"the gallery deleted, the answer": deleted, "until all is freed": time.perf_counter() - begin}
    stop.set()
    writer.join()
    return {**found, "a write meanwhile, median": statistics.median(waits), "a write meanwhile, longest": max(waits)}


def write(server: Server) -> None:
    server.post("/galleries/h/items", version="v1", items=[{"id": "x", "metadata": {}, "embedding": [0.1] * 128}])


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


if __name__ == "__main__":
    run_main(main)
