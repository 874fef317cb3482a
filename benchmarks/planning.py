"""The cost of planning a backfill of a large gallery, and how long writes to the gallery wait meanwhile.

    python benchmarks/planning.py oldest random --items 1000000

On SQLite, without vectors: planning reads none. Each order runs in a separate process, so that none reuses the memory
of another. The growth is that of the largest resident size. Processor seconds are of the process. `longest` is the
longest processor time of one of its writing transactions, during which no other write can run. `wait` is the longest
time that a concurrent thread waited for a transaction that takes a number of the feed. It is wall time, so mind the
load.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from command_line import Count, choice_of, run_main
from sqlalchemy import Connection, delete, insert, select, text

from service.backfills.scores import NO_SCORES
from service.backfills.sweeps import continue_sweep, new_sweep_columns
from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.galleries.gallery import take_seq
from service.store.rows import BackfillRow, one_of
from service.store.tables import backfill, backfill_chunk, gallery, version

ORDERS = ["oldest", "newest", "random", "traffic", "transformed"]
NUMBERS = "with recursive n(x) as (select 1 union all select x + 1 from n where x < {items})"
ITEM = "insert into item (id, gallery_id, external_id, metadata, seq, deleted, created, blob)"
FILL = (
    ITEM + " {numbers} select x, 1, 'i' || x, '{{}}', x, 0, 0, '1/' || x from n",
    "insert into embedding (item_id, version_id, origin, vector) {numbers} select x, 1, 'encoded', x'' from n",
    "insert into item_traffic (item_id, matches) {numbers} select x, x % 97 from n where x % 10 = 0",
)


def main(
    orders: Annotated[list[str], typer.Argument(parser=choice_of(ORDERS))] = ORDERS, items: Count = 1_000_000
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        settings = Settings(data=Path(scratch))
        fill(settings, items)
        print(f"{items:,} items; load {os.getloadavg()[0]:.1f}")
        print("| order | seconds | processor | writes | longest ms | wait ms | memory MiB | bytes an item |")
        print(f"|{' --- |' * 8}")
        for order in orders:
            with multiprocessing.get_context("spawn").Pool(1) as alone:
                told = alone.apply(planned, (settings.database_url, order, items))
            times = f"{told.seconds:.1f} | {told.processor:.1f} | {told.writes} | {told.longest:.0f} | {told.wait:.0f}"
            print(f"| {order} | {times} | {told.grown / 2**20:.0f} | {told.grown / items:.0f} |")


def fill(settings: Settings, items: int) -> None:
    upgrade(settings)
    with closing(Database(settings.database_url)) as database, database.write() as connection:
        for number, card in enumerate(({}, {"files": {"encoder.onnx": "0"}}), 1):
            values = {"id": number, "name": f"v{number}", "card": card, "card_sha256": "", "created": 0}
            connection.execute(insert(version).values(values))
        connection.execute(insert(gallery).values(id=1, name="g", next_seq=items + 1, current_id=2, created=0))
        for statement in FILL:
            connection.execute(text(statement.format(numbers=NUMBERS.format(items=items)).replace(":", "\\:")))


class Told(NamedTuple):
    """What planning took: seconds, milliseconds, bytes."""

    seconds: float
    processor: float
    writes: int
    longest: float
    wait: float
    grown: int


class Timed(Database):
    """A database that tells how long its writing transactions compute."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.took: list[float] = []

    @contextmanager
    def write(self, *, dry_run: bool = False) -> Iterator[Connection]:
        began = time.thread_time()
        with super().write(dry_run=dry_run) as connection:
            yield connection
        self.took.append(time.thread_time() - began)


def planned(url: str, order: str, items: int) -> Told:
    job = {"gallery_id": 1, "version_id": 2, "kind": "reencode", "state": "running", "chunk_size": 64, "total": 0}
    job |= {"item_order": order, "next_claim": 0, "created": 0, "attempts": 1}
    with closing(Timed(url)) as database, closing(Database(url)) as other:
        with database.write() as connection:
            values = {**job, **new_sweep_columns(take_seq(connection, 1, 0))}
            row = one_of(BackfillRow, connection.execute(insert(backfill).values(values).returning(backfill)))
        database.took.clear()
        waits, done = [0.0], threading.Event()
        writer = threading.Thread(target=keep_writing, args=(other, waits, done))
        writer.start()
        before, began, computed = largest(), time.perf_counter(), time.process_time()
        try:
            assert continue_sweep(database, row, [2, 1], lambda: NO_SCORES) == "running"
            seconds, processor = time.perf_counter() - began, time.process_time() - computed
        finally:
            done.set()
            writer.join()
        with database.write() as connection:
            grown = largest() - before
            assert connection.execute(select(backfill.c.total).where(backfill.c.id == row.id)).scalar_one() == items
            connection.execute(delete(backfill_chunk))
            connection.execute(delete(backfill))
        return Told(seconds, processor, len(database.took), 1000 * max(database.took), 1000 * max(waits), grown)


def keep_writing(database: Database, waits: list[float], done: threading.Event) -> None:
    """What every write to the gallery does first, again and again."""
    while not done.wait(0.01):
        began = time.perf_counter()
        with database.write() as connection:
            take_seq(connection, 1, 0)
        waits.append(time.perf_counter() - began)


def largest() -> int:
    """Bytes this process has ever had in memory; `getrusage` would tell its parent's as well."""
    (told,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(told)


if __name__ == "__main__":
    run_main(main)
