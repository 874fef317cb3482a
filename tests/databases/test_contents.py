"""What a start reads of a gallery, in blocks of columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import delete, update

from index.contents import Contents
from index.engines.digest import UNKNOWN, digests
from service.registry.version_records import insert_version
from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.galleries.contents import gallery_contents
from service.store.galleries.embeddings import put_embeddings
from service.store.galleries.gallery import insert_gallery, take_seq
from service.store.galleries.items import NewItem, delete_items, store_items
from service.store.tables import embedding
from staging.inputs.builders import make_version


@pytest.fixture
def database(settings: Settings, tmp_path: Path) -> Iterator[Database]:
    upgrade(settings)
    with closing(Database(settings.database_url)) as made:
        with made.write() as connection:
            for name in ("v1", "v2"):
                insert_version(connection, make_version(tmp_path / name, name, 2, encoder=False), [])
        yield made


def test_everything_that_live_items_hold_comes_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.store.galleries.contents.ITEMS_PER_BLOCK", 2)
    vectors = np.eye(6, 2, dtype=np.float32)
    documents = [{"n": n, "text": 'ü\n"'} for n in range(6)]
    with database.write() as connection:
        galleries = [insert_gallery(connection, name) for name in ("g", "other")]
        for n, vector in enumerate(vectors):  # keys of the two take turns
            for g in galleries:
                new = [NewItem(f"i{n}", documents[n], "supplied", vector)]
                store_items(connection, g, 1, new, take_seq(connection, g, 1))
        put_embeddings(connection, 1, 2, "transformed", [1, 5], vectors[[0, 2]], None)
        connection.execute(update(embedding).where(embedding.c.item_id == 3).values(digest=None))
        connection.execute(delete(embedding).where(embedding.c.item_id == 7))
        delete_items(connection, galleries[0], ["i4"])
    with database.read() as connection:
        blocks = list(gallery_contents(connection, galleries[0], "v{}".format))
    assert [block.keys_N.tolist() for block in blocks] == [[1, 3], [5, 7], [11]]
    assert [json.loads(text) for block in blocks for text, _ in texts(block)] == [documents[n] for n in (0, 1, 2, 3, 5)]
    assert [name for block in blocks for _, name in texts(block)] == ["i0", "i1", "i2", "i3", "i5"]
    assert [block.seqs_N.tolist() for block in blocks] == [[1, 2], [3, 4], [6]]
    digest = {1 + 2 * n: int(digests(vectors[[n]])[0]) for n in range(6)} | {3: UNKNOWN}
    supplied, transformed = ("v1", "supplied"), ("v2", "transformed")
    assert [held(block) for block in blocks] == [
        {supplied: {1: digest[1], 3: UNKNOWN}, transformed: {1: digest[1]}},
        {supplied: {5: digest[5]}, transformed: {5: digest[5]}},
        {supplied: {11: digest[11]}},
    ]


def texts(block: Contents) -> list[tuple[str, str]]:
    text = block.texts.tobytes()
    return [(text[a:b].decode(), text[b:c].decode()) for a, b, c in block.text_offsets_N3.tolist()]


def held(block: Contents) -> dict[tuple[str, str], dict[int, int]]:
    """Place -> key -> digest."""
    return {
        place: dict(zip(block.keys_N[items_M].tolist(), digests_M.tolist(), strict=True))
        for place, (items_M, digests_M) in block.embeddings.items()
    }
