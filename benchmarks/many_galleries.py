"""The cost of a start with many galleries that no request has used yet.

    python benchmarks/many_galleries.py --galleries 10 --galleries 10000 --starts 5

Each of GALLERIES holds three items. A service without HTTP starts STARTS times over each number, in turns; then one
gallery is queried. Processor time, medians: until the service is up, until that gallery has answered, and of the
following seconds, in which a thread removes the files of deleted galleries.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from command_line import Count, Counts, run_main
from sqlalchemy import update

from index.version import Card
from index.version_folder.folder import load_version, write_card
from service.registry.version_records import insert_version
from service.runtime import running
from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.galleries.gallery import insert_gallery, take_seq
from service.store.galleries.items import NewItem, store_items
from service.store.tables import gallery

GALLERIES = [10, 10_000]
ITEMS, BEHIND_SECONDS = 3, 3.0
VECTORS = np.eye(ITEMS, dtype=np.float32)


def main(galleries: Counts = GALLERIES, starts: Count = 5) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = {count: filled(Path(folder) / str(count), count) for count in galleries}
        taken: dict[int, list[list[float]]] = defaultdict(list)
        for _ in range(starts):
            for count, settings in made.items():
                taken[count].append(started(settings))
    print("| galleries | start ms | first answer ms | 3 s behind it ms |")
    print("| --- | --- | --- | --- |")
    for count, rows in taken.items():
        medians = [1e3 * statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"| {count} |", " | ".join(f"{median:.0f}" for median in medians), "|")


def filled(folder: Path, count: int) -> Settings:
    """So many galleries of one version whose vectors are supplied."""
    settings = Settings(data=folder)
    folder.mkdir()
    upgrade(settings)
    (settings.versions / "v").mkdir(parents=True)
    write_card(settings.versions / "v", Card("v", ITEMS, {"kind": "cosine"}, None, method="supplied"))
    database = Database(settings.database_url)
    with database.write() as connection:
        insert_version(connection, load_version(settings.versions / "v"), [])
        for number in range(count):
            key = insert_gallery(connection, f"g{number}")
            items = [NewItem(f"i{n}", {}, "supplied", vector) for n, vector in enumerate(VECTORS)]
            store_items(connection, key, 1, items, take_seq(connection, key, ITEMS))
        connection.execute(update(gallery).values(current_id=1))
    database.close()
    return settings


def started(settings: Settings) -> list[float]:
    """Seconds of processor time of each part."""
    clock = [time.process_time()]
    with running(settings, migrated=True) as runtime:
        clock.append(time.process_time())
        runtime.replica.find("g0").gallery.search("v", lambda _: VECTORS, ITEMS)
        clock.append(time.process_time())
        time.sleep(BEHIND_SECONDS)
        clock.append(time.process_time())
    return np.diff(clock).tolist()


if __name__ == "__main__":
    run_main(main)
