"""What a start reads of a gallery, in blocks of columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import delete, update

from service.registry.registry import insert_version
from service.settings import Settings
from service.store.contents import contents
from service.store.database import Database, upgrade
from service.store.embeddings import put_embeddings
from service.store.repository import NewItem, delete_items, insert_gallery, store_items, take_seq
from service.store.tables import embedding
from service.store.vector_codec import NO_DIGEST, digests_to_bytes
from staging.builders import make_version


@pytest.fixture
def database(settings: Settings, tmp_path: Path) -> Iterator[Database]:
    upgrade(settings)
    with closing(Database(settings.database_url)) as made:
        with made.write() as connection:
            for name in ("v1", "v2"):
                insert_version(connection, make_version(tmp_path / name, name, 2, encoder=False), [])
        yield made


def test_everything_that_live_items_hold_comes_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.store.contents.ITEMS", 2)
    vectors = np.eye(6, 2, dtype=np.float32)
    documents = [{"n": n, "text": 'ü\n"'} for n in range(6)]
    with database.write() as connection:
        galleries = [insert_gallery(connection, name) for name in ("g", "other")]
        for n, vector in enumerate(vectors):  # keys of the two take turns
            for g in galleries:
                new = [NewItem(f"i{n}", documents[n], "supplied", vector)]
                store_items(connection, g, 1, new, take_seq(connection, g, 1))
        put_embeddings(connection, 2, "transformed", [1, 5], vectors[[0, 2]], None)
        connection.execute(update(embedding).where(embedding.c.item_id == 3).values(digest=None))
        connection.execute(delete(embedding).where(embedding.c.item_id == 7))
        delete_items(connection, galleries[0], ["i4"])
    with database.read() as connection:
        blocks = list(contents(connection, galleries[0]))
    assert [block.keys for block in blocks] == [[1, 3], [5, 7], [11]]
    assert [json.loads(text) for block in blocks for text in block.metadata] == [documents[n] for n in (0, 1, 2, 3, 5)]
    assert [(block.ids, block.seqs) for block in blocks] == [
        (["i0", "i1"], [1, 2]),
        (["i2", "i3"], [3, 4]),
        (["i5"], [6]),
    ]
    digits = {1 + 2 * n: digests_to_bytes(vectors[[n]]).hex() for n in range(6)} | {3: NO_DIGEST}
    held = [
        {place: dict(zip(keys, pieces(joined), strict=True)) for place, (keys, joined) in block.held.items()}
        for block in blocks
    ]
    supplied, transformed = (1, "supplied"), (2, "transformed")
    assert held == [
        {supplied: {1: digits[1], 3: NO_DIGEST}, transformed: {1: digits[1]}},
        {supplied: {5: digits[5]}, transformed: {5: digits[5]}},
        {supplied: {11: digits[11]}},
    ]


def pieces(digits: str) -> list[str]:
    return [digits[at : at + len(NO_DIGEST)].lower() for at in range(0, len(digits), len(NO_DIGEST))]
