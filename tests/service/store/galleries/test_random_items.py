"""Items drawn by a seed: all of them once, evenly, the same again, and few in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import Connection, insert

from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.galleries import random_items
from service.store.galleries.gallery import insert_gallery
from service.store.galleries.random_items import RandomItems
from service.store.galleries.ranges import Keys
from service.store.tables import item

ITEMS = 500


@pytest.fixture
def connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """Of a gallery with items 1 to 500."""
    monkeypatch.setattr(random_items, "KEYS_PER_RANGE", 30)
    monkeypatch.setattr(random_items, "FIRST_BLOCK", 50)
    settings = Settings(data=tmp_path)
    upgrade(settings)
    with closing(Database(settings.database_url)) as database, database.write() as opened:
        about = {"gallery_id": insert_gallery(opened, "g"), "metadata": {}, "deleted": False, "created": 0.0}
        opened.execute(insert(item), [{**about, "external_id": f"i{n}", "seq": n + 1} for n in range(ITEMS)])
        yield opened


def drawn(connection: Connection, seed: int, upto: int = ITEMS) -> list[int]:
    blocks = list(RandomItems(connection, item.c.id <= upto, seed).in_blocks(7))
    assert max(map(len, blocks), default=0) <= 7
    return [key for block in blocks for key in block]


def test_all_are_drawn_once_in_an_order_of_the_seed_that_what_is_added_leaves_as_it_was(
    connection: Connection,
) -> None:
    order = drawn(connection, 3)
    assert sorted(order) == list(range(1, ITEMS + 1))
    assert drawn(connection, 3) == order
    assert drawn(connection, 4) != order
    assert drawn(connection, 3, upto=400) == [key for key in order if key <= 400]
    assert drawn(connection, 3, upto=0) == []


def test_few_are_held_at_a_time_and_each_is_drawn_as_often_as_any_other(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, hashes = [], random_items._hashes

    def noting(keys: Keys, seed: int) -> random_items.Hashes:
        sizes.append(len(keys))
        return hashes(keys, seed)

    monkeypatch.setattr(random_items, "_hashes", noting)
    sample = RandomItems(connection, item.c.id > 0, 7)
    assert sample.first(50) == drawn(connection, 7)[:50]
    assert (sample.total, max(sizes)) == (ITEMS, 30)

    counts = np.bincount(
        [key for seed in range(100) for key in RandomItems(connection, item.c.id <= 30, seed).first(15)]
    )
    assert counts[1:].sum() == 1500
    assert counts[1:].min() > 25
    assert counts[1:].max() < 75
