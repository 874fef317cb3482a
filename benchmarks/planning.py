"""Planning a backfill of a large gallery: seconds, and what the process's memory grows by, for each order.

    python benchmarks/planning.py [ITEMS] [ORDER ...]

On SQLite, without vectors: planning reads none. Each order in a process of its own, so that none finds the memory that
another one left. The growth is that of the largest resident size.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from sqlalchemy import insert, text

from service.backfills.planner import plan
from service.settings import Settings
from service.store.database import Database, upgrade
from service.store.rows import BackfillRow, one_of
from service.store.tables import backfill, gallery, version

ORDERS = ("oldest", "newest", "random", "traffic", "transformed")
NUMBERS = "with recursive n(x) as (select 1 union all select x + 1 from n where x < {items})"
ITEM = "insert into item (id, gallery_id, external_id, metadata, seq, deleted, created, blob)"
FILL = (
    ITEM + " {numbers} select x, 1, 'i' || x, '{{}}', x, 0, 0, '1/' || x from n",
    "insert into embedding (item_id, version_id, origin, vector) {numbers} select x, 1, 'encoded', x'' from n",
    "insert into item_traffic (item_id, matches) {numbers} select x, x % 97 from n where x % 10 = 0",
)


def main(items: str = "1000000", *orders: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        settings = Settings(data=Path(scratch))
        fill(settings, int(items))
        print(f"{int(items):,} items; load {os.getloadavg()[0]:.1f}\n| order | seconds | memory MiB | bytes an item |")
        print(f"|{' --- |' * 4}")
        for order in orders or ORDERS:
            with multiprocessing.get_context("spawn").Pool(1) as alone:
                seconds, grown = alone.apply(planned, (settings.database_url, order, int(items)))
            print(f"| {order} | {seconds:.1f} | {grown / 2**20:.0f} | {grown / int(items):.0f} |")


def fill(settings: Settings, items: int) -> None:
    upgrade(settings)
    with closing(Database(settings.database_url)) as database, database.write() as connection:
        for number, card in enumerate(({}, {"files": {"encoder.onnx": "0"}}), 1):
            values = {"id": number, "name": f"v{number}", "card": card, "card_sha256": "", "created": 0}
            connection.execute(insert(version).values(values))
        connection.execute(insert(gallery).values(id=1, name="g", next_seq=items + 1, current_id=2, created=0))
        for statement in FILL:
            connection.execute(text(statement.format(numbers=NUMBERS.format(items=items)).replace(":", "\\:")))


def planned(url: str, order: str, items: int) -> tuple[float, int]:
    """Seconds, and bytes that the process grew by."""
    job = {"gallery_id": 1, "version_id": 2, "kind": "reencode", "state": "running", "chunk_size": 256, "total": 0}
    job |= {"item_order": order, "next_claim": 0, "created": 0, "attempts": 1}
    with closing(Database(url)) as database, database.write(dry_run=True) as connection:
        row = one_of(BackfillRow, connection.execute(insert(backfill).values(job).returning(backfill)))
        connection.exec_driver_sql("pragma cache_size=-1024")  # the database's own pages are not planning's
        before = largest()
        began = time.perf_counter()
        assert plan(connection, row, [2, 1]) == items
        took = time.perf_counter() - began
        return took, largest() - before


def largest() -> int:
    """Bytes this process has ever had in memory; `getrusage` would tell its parent's as well."""
    (told,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(told)


if __name__ == "__main__":
    main(*sys.argv[1:])
