"""A gallery that is written, sealed and started again from snapshots, and all that it shows, to compare it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import select, update

from service.replica.loaded import LoadedGallery
from service.store.galleries.embeddings import put_embeddings
from service.store.galleries.gallery import take_seq
from service.store.galleries.items import NewItem, store_items
from service.store.tables import gallery, item
from staging.inputs.builders import make_version
from staging.states.replicated import ReplicatedWorld

DIMS = {1: 2, 2: 3}
NAMES = [f"i{n}" for n in range(12)]


class SnapshotWorld(ReplicatedWorld):
    """One gallery, written to and sealed by one process, which starts again and again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, make_version)
        self.copy = folder / "copy.db"
        self.count = 0
        self.create()
        self.write(1, *NAMES)
        self.backup()

    def loaded(self) -> LoadedGallery:
        return self.replica.find("g")

    def start(self) -> None:
        self.replica = self.new_replica()

    def write(self, version: int, *names: str) -> None:
        new = []
        for name in names:
            self.count += 1
            drawn = np.random.default_rng(self.count).normal(size=DIMS[version])
            vector = (drawn / np.linalg.norm(drawn)).astype(np.float32)
            new.append(NewItem(name, {"n": self.count, "é": name}, "supplied", vector))
        with self.database.write() as connection:
            store_items(connection, 1, version, new, take_seq(connection, 1, len(new)))

    def add(self, version: int, *names: str) -> None:
        """Embeddings beside those there are."""
        with self.database.write() as connection:
            first = take_seq(connection, 1, len(names))
            for number, name in enumerate(names):
                self.count += 1
                vector = np.eye(1, DIMS[version], self.count % DIMS[version], dtype=np.float32)
                mine = item.c.external_id == name
                key = connection.execute(select(item.c.id).where(mine, item.c.deleted.is_(False))).scalar()
                if key is not None:
                    put_embeddings(connection, 1, version, "transformed", [key], vector)
                    connection.execute(update(item).where(item.c.id == key).values(seq=first + number))

    def deploy(self, version: int) -> None:
        with self.database.write() as connection:
            take_seq(connection, 1, 1)
            connection.execute(update(gallery).values(current_id=version))

    def seal(self) -> None:
        self.replica.refresh(1)
        while self.loaded().gallery.build_index():
            pass

    def snapshot(self) -> None:
        self.replica.refresh(1)
        self.replica.write_snapshot(self.loaded(), settled=True)

    def backup(self) -> None:
        with closing(sqlite3.connect(self.database_file)) as now, closing(sqlite3.connect(self.copy)) as then:
            now.backup(then)

    def restore(self) -> None:
        with closing(sqlite3.connect(self.database_file)) as now, closing(sqlite3.connect(self.copy)) as then:
            then.backup(now)
        self.start()

    @property
    def database_file(self) -> str:
        return str(self.settings.data / "regraft.db")

    def rebuilt(self) -> LoadedGallery:
        """The gallery by the database alone."""
        replica = self.new_replica()
        replica._indexes = self.settings.data / "none"
        return replica.find("g")


def shown(loaded: LoadedGallery) -> Any:
    """All that a gallery shows: of each item what is known, and how it is found by each version."""
    queries = {"v1": np.array([[1, 0], [0, 1], [0.6, 0.8]], np.float32), "v2": np.eye(3, dtype=np.float32)}
    found = {}
    for version in queries:
        answer = loaded.gallery.search(version, queries.__getitem__, 1_000, encoders=frozenset(queries), exact=True)
        scores = np.round(np.sort(answer.scores_QK, axis=1), 5).tolist()
        found[version] = [scores, {key: tuple(one) for key, one in answer.items.items()}]
    return loaded.seq, loaded.current and loaded.current.name, loaded.gallery.items_by_version(), found
