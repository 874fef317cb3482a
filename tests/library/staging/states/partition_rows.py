"""PostgreSQL's partitions of embeddings, and what lies in each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from sqlalchemy import Connection, text

from service.store.database.connections import Database
from service.store.galleries.gallery import take_seq
from service.store.galleries.items import NewItem, store_items

PLACES = "select tableoid::regclass::text, item_id, gallery_id, version_id from embedding order by item_id, version_id"


def places(database: Database) -> list[Any]:
    """The partition, the item, the gallery and the version of each embedding."""
    with database.lookup() as connection:
        return [tuple(row) for row in connection.execute(text(PLACES))]


def names(database: Database) -> set[str]:
    """Of the partitions."""
    mine = "select inhrelid::regclass::text from pg_inherits where inhparent = 'embedding'::regclass"
    with database.lookup() as connection:
        return set(connection.execute(text(mine)).scalars())


@contextmanager
def held(database: Database, statement: str) -> Iterator[None]:
    """Somebody in a transaction that has run a statement."""
    with database.write() as connection:
        connection.execute(text(statement))
        yield


def store(connection: Connection, gallery_id: int, *names: str) -> None:
    """Items with one vector each, by version 1."""
    new = [NewItem(name, {}, "supplied", np.eye(1, 4, dtype=np.float32)[0]) for name in names]
    store_items(connection, gallery_id, 1, new, take_seq(connection, gallery_id, len(new)))
