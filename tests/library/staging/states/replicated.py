"""`ReplicatedWorld`: a database that a replica follows, with writes like those of another process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import update

from index.version import Version
from service.registry.registry import Registry
from service.registry.version_records import insert_version
from service.replica.replica import Replica
from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.galleries.gallery import insert_gallery, take_seq
from service.store.galleries.items import NewItem, delete_items, store_items
from service.store.tables import gallery


class ReplicatedWorld:
    """A database with v1 and v2 (truncating to v1), and a replica of it."""

    def __init__(self, folder: Path, make_version: Callable[..., Version], database_url: str = "") -> None:
        self.settings = Settings(data=folder, database_url=database_url)
        upgrade(self.settings)
        self.database = Database(self.settings.database_url)
        v1 = make_version(self.settings.versions / "v1", "v1", 2)
        v2 = make_version(self.settings.versions / "v2", "v2", 3, edges=[(v1, "truncate")])
        with self.database.write() as connection:
            insert_version(connection, v1, [])
            insert_version(connection, v2, [1])
        self.replica = self.new_replica()

    def new_replica(self, **more: Any) -> Replica:
        return Replica(self.database, Registry(self.database, self.settings), self.settings.indexes, 0.005, **more)

    def create(self, name: str = "g", current: int | None = 1) -> int:
        with self.database.write() as connection:
            gallery_id = insert_gallery(connection, name)
            connection.execute(update(gallery).where(gallery.c.id == gallery_id).values(current_id=current))
        return gallery_id

    def store(self, gallery_id: int, version_id: int, **vectors: list[float]) -> None:
        items = [NewItem(name, {}, "supplied", np.asarray(v, np.float32)) for name, v in vectors.items()]
        with self.database.write() as connection:
            store_items(connection, gallery_id, version_id, items, take_seq(connection, gallery_id, len(items)))

    def delete(self, gallery_id: int, *names: str) -> None:
        with self.database.write() as connection:
            delete_items(connection, gallery_id, names)
