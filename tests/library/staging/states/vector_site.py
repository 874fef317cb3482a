"""A database whose vectors are moved into files, with a plain model of what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select

from index.space import Vectors
from service.settings import Settings
from service.store.blob_references import open_blobs
from service.store.database.connections import Database
from service.store.galleries.change_feed import changes
from service.store.galleries.embeddings import embeddings_by_id, put_embeddings, vectors_of
from service.store.galleries.gallery import insert_gallery, take_seq
from service.store.galleries.items import NewItem, delete_items, rows_of, store_items
from service.store.offloading.offloader import Offloader
from service.store.tables import embedding
from service.store.vectors.files import IS_IN_DATABASE, files

DIM = 3
V1, V2 = 1, 2
GALLERIES = ("g", "h")
IDS = [f"i{n}" for n in range(40)]


def vectors_in_files(database: Database) -> int:
    """How many vectors a database does not hold itself."""
    with database.lookup() as connection:
        return int(connection.execute(select(func.count()).select_from(embedding).where(~IS_IN_DATABASE)).scalar_one())


class Site:
    """A database with its image store, a plain model of what both hold, and whoever moves vectors."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.database = Database(settings.database_url)
        self.blobs = open_blobs(self.database, settings.blobs_url)
        # (gallery, id) -> version -> bytes.
        self.held: dict[tuple[int, str], dict[int, bytes]] = {}

    def mover(self, store: Any = "objects") -> Offloader:
        """A process that has just started."""
        return Offloader(self.database, self.blobs, store)

    def fill(self) -> None:
        """A gallery of all ids with random vectors: the first one, so its key is 1."""
        with self.database.write() as connection:
            insert_gallery(connection, "g")
        self.write(1, IDS, np.random.default_rng(0).normal(size=(len(IDS), DIM)).astype(np.float32))

    def write(self, gallery: int, ids: list[str], vectors: Vectors) -> None:
        with self.database.write() as connection:
            new = [NewItem(one, {}, "supplied", vector) for one, vector in zip(ids, vectors, strict=True)]
            store_items(connection, gallery, V1, new, take_seq(connection, gallery, len(new)))
        self.held |= {(gallery, one): {V1: row.tobytes()} for one, row in zip(ids, vectors, strict=True)}

    def add(self, gallery: int, ids: list[str], vectors: Vectors) -> None:
        """Embeddings by the second version, as a backfill writes them."""
        there = [one for one in ids if (gallery, one) in self.held]
        with self.database.write() as connection:
            take_seq(connection, gallery, 1)
            keys = {row.external_id: row.id for row in rows_of(connection, gallery, there)}
            put_embeddings(connection, gallery, V2, "transformed", [keys[one] for one in there], vectors[: len(there)])
        for one, row in zip(there, vectors, strict=False):
            self.held[gallery, one][V2] = row.tobytes()

    def delete(self, gallery: int, ids: list[str], _: Vectors) -> None:
        with self.database.write() as connection:
            delete_items(connection, gallery, ids)
        for one in ids:
            self.held.pop((gallery, one), None)

    def check(self, galleries: list[int]) -> None:
        """Every vector is there, bit by bit, whichever way it is read."""
        with self.database.read() as connection:
            for gallery in galleries:
                wanted = {one: held for (of, one), held in self.held.items() if of == gallery}
                fed: dict[str, dict[int, bytes]] = {}
                for block in changes(connection, gallery, 0):
                    for _, version, _, vector, _, one, *_ in block:
                        fed.setdefault(one, {})[version] = vector  # type: ignore[index,assignment]
                assert fed == wanted
                found = embeddings_by_id(connection, gallery, IDS)
                assert {one: {row.version_id: row.vector for row in rows} for one, rows in found.items()} == wanted
                keys = {row.id: row.external_id for row in rows_of(connection, gallery, list(wanted))}
                stored = vectors_of(connection, gallery, list(keys))
                assert {keys[key]: {v: row for v, (_, row) in held.items()} for key, held in stored.items()} == wanted

    def far(self) -> int:
        """Vectors that the database does not hold itself."""
        return vectors_in_files(self.database)

    def there(self) -> dict[str, str]:
        """Key -> state of each file that has a row."""
        with self.database.lookup() as connection:
            return {file.key: file.state for file in files(connection)}


def written_meanwhile(patch: pytest.MonkeyPatch, owner: Any, name: str, write: Callable[[], None]) -> None:
    """Have others write once that is done, before what was read for it is used."""
    work: Callable[..., Any] = getattr(owner, name)

    def interrupted(*args: Any, **named: Any) -> Any:
        done = work(*args, **named)
        patch.setattr(owner, name, work)
        write()
        return done

    patch.setattr(owner, name, interrupted)
