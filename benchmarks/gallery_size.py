"""What grows with a gallery: loading it, a page of its items, planning its backfill, and deleting it.

    python benchmarks/gallery_size.py [ITEMS]

ITEMS (default 100000) embeddings of 128 numbers, over HTTP, on a real service. While the
gallery is deleted another client writes items into another gallery, one a request: how long the longest one waits.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from backfill import Server, fill
from made_versions import small, write_version
from sqlalchemy import create_engine, func, select

from service.registry.registry import Registry
from service.replica.replica import Replica
from service.settings import Settings
from service.store.database import Database
from service.store.tables import gallery

PAGES = 20


def main(items: str = "100000") -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        v1 = write_version(root / "v1", "v1", 128, small, None)
        v2 = write_version(root / "v2", "v2", 256, small, v1)
        server = Server(root / "data")
        try:
            for version in (v1, v2):
                server.register(version)
            for name, count in (("g", int(items)), ("h", 1)):
                fill(server, name, "v1", "v2", 0, count, 128)
            server.close()
            print(f"loaded {load(server.settings):.2f} s of processor time")
            server = Server(root / "data")
            measure(server)
        finally:
            server.close()


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


def measure(server: Server) -> None:
    cursor, took = "", []
    for _ in range(PAGES):
        page, seconds = timed(lambda: server.http.get("/galleries/g/items", params={"cursor": cursor}).json())  # noqa: B023
        cursor = page["next"]
        took.append(seconds)
    print(f"a page of 100 items {statistics.median(took) * 1e3:.1f} ms")
    _, seconds = timed(lambda: server.post("/galleries/g/backfills", kind="transform"))
    print(f"a backfill planned {seconds * 1e3:.0f} ms")
    waits, stop = [timed(lambda: write(server))[1] for _ in range(PAGES)], threading.Event()
    print(f"a write {statistics.median(waits) * 1e3:.1f} ms")
    waits.clear()

    def go_on() -> None:
        while not stop.is_set():
            waits.append(timed(lambda: write(server))[1])

    writer = threading.Thread(target=go_on)
    writer.start()
    begin = time.perf_counter()
    _, seconds = timed(lambda: server.http.delete("/galleries/g", params={"confirm": "g"}))
    engine = create_engine(server.settings.database_url)
    while True:
        with engine.connect() as connection:
            if connection.execute(select(func.count()).select_from(gallery)).scalar_one() == 1:
                break
        time.sleep(0.05)
    print(f"deleted: answered after {seconds * 1e3:.0f} ms, all freed after {time.perf_counter() - begin:.1f} s")
    stop.set()
    writer.join()
    print(f"a write meanwhile: median {statistics.median(waits) * 1e3:.1f} ms, longest {max(waits) * 1e3:.0f} ms")


def write(server: Server) -> None:
    server.post("/galleries/h/items", version="v1", items=[{"id": "x", "metadata": {}, "embedding": [0.1] * 128}])


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


if __name__ == "__main__":
    main(*sys.argv[1:])
