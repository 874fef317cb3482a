from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, Text, cast, insert, select

from index.metadata.metadata import Item
from service.errors import UnknownGallery, UnknownItem
from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.galleries import change_feed, held_versions
from service.store.galleries.change_feed import changes
from service.store.galleries.deletion import delete_gallery, deleted_galleries, forget_gallery, free_items
from service.store.galleries.embeddings import put_embeddings
from service.store.galleries.gallery import gallery_named, gallery_row, insert_gallery, take_seq
from service.store.galleries.held_versions import live_items_by_version, versions_with_embeddings
from service.store.galleries.items import (
    NewItem,
    delete_items,
    items_after,
    items_named,
    live_item,
    set_metadata,
    store_items,
)
from service.store.sql import arrays as listed
from service.store.sql.partitioned import of_item
from service.store.tables import embedding, item, version
from service.store.vectors.codec import from_bytes, to_bytes
from service.store.vectors.files import read_from_database


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    """A transaction on a database with versions 1 and 2 and gallery 1, called g."""
    settings = Settings(data=tmp_path)
    upgrade(settings)
    database = Database(settings.database_url)
    with database.write() as opened:
        for number in (1, 2):
            opened.execute(insert(version).values(id=number, name=f"v{number}", card={}, card_sha256="", created=0))
        assert insert_gallery(opened, "g") == 1
        yield opened
    database.close()


def new(name: str, number: float = 0, blob: str | None = None, **metadata: Any) -> NewItem:
    return NewItem(name, metadata, "encoded", np.full(2, number, np.float32), None, blob)


def store(connection: Connection, *items: NewItem, version_id: int = 1, gallery_id: int = 1) -> list[str]:
    return store_items(connection, gallery_id, version_id, items, take_seq(connection, gallery_id, len(items)))


def feed(connection: Connection, after: int = 0) -> list[tuple[int, int | None, float | None]]:
    rows = [row for block in changes(connection, 1, after) for row in block]
    assert all((origin is None) == (vector is None) for _, _, origin, vector, *_ in rows)
    assert all(isinstance(json.loads(row[4]), dict) for row in rows)
    return [
        (key, active, None if vector is None else float(from_bytes([vector], 2)[0, 0]))
        for key, active, _, vector, *_ in rows
    ]


def test_new_items_are_told_at_once_as_the_feed_tells_them(connection: Connection) -> None:
    awkward = {
        "lines": "a\nb\r\u2028",
        "quotes": "\\\"'",
        "zero": "\x00",
        "long": 1 << 70,
        "deep": [{"x": None}, 1e300],
    }
    store(connection, new("before"))
    first = take_seq(connection, 1, 3)
    added = [new("plain"), new("awkward", **awkward), new("named\u00e4 , [")]
    store_items(connection, 1, 1, added, first)

    told = items_named(connection, 1, first, [one.external_id for one in added])

    rows = [row for block in changes(connection, 1, first - 1) for row in block]
    assert list(told.items()) == [(row[0], Item(*row[4:7])) for row in rows]
    assert json.loads([*told.values()][1].metadata) == awkward


def test_vectors_survive_storage_bit_by_bit() -> None:
    vectors = np.array([[1, -0.0, 1e-45], [np.float32(1 / 3), 3e38, 7]], np.float32)

    np.testing.assert_array_equal(vectors.view(np.int32), from_bytes([to_bytes(v) for v in vectors], 3).view(np.int32))
    assert from_bytes([], 3).shape == (0, 3)
    assert from_bytes([to_bytes(vectors[0])], 3).flags.writeable


def test_live_items_are_counted_by_the_version_that_serves_them(connection: Connection) -> None:
    insert_gallery(connection, "h")
    store(connection, new("c"), version_id=2)
    store(connection, new("a"), new("b"), new("gone"))
    store(connection, new("other"), gallery_id=2)
    delete_items(connection, 1, ["gone"])

    put(connection, 2, 2)

    assert list(live_items_by_version(connection, 1, [1, 2]).items()) == [(1, 2), (2, 1)]
    assert list(live_items_by_version(connection, 1, [2, 1]).items()) == [(1, 1), (2, 2)]
    assert live_items_by_version(connection, 3, [1, 2]) == {}
    assert [versions_with_embeddings(connection, gallery_id) for gallery_id in (1, 2, 3)] == [{1, 2}, {1}, set()]


def test_versions_are_found_among_the_first_items_and_behind_them(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_versions, "FIRST_ITEMS", 2)
    insert_gallery(connection, "h")
    store(connection, *(new(f"i{n}") for n in range(4)))
    store(connection, new("of h"), version_id=2, gallery_id=2)
    assert [versions_with_embeddings(connection, number) for number in (1, 2)] == [{1}, {2}]

    put(connection, 4, 2)

    assert [versions_with_embeddings(connection, number) for number in (1, 2)] == [{1, 2}, {2}]


@pytest.mark.parametrize(
    "ask",
    [
        lambda connection: versions_with_embeddings(connection, 2),
        lambda connection: versions_with_embeddings(connection, 3),
        lambda connection: read_from_database(connection, 1, 1, range(1, 11), 1 << 40),
    ],
)
def test_other_items_are_not_read(connection: Connection, ask: Callable[[Connection], object]) -> None:
    for name in ("h", "later"):
        insert_gallery(connection, name)
    store(connection, *(new(f"i{n}") for n in range(5_000)))
    store(connection, *(new(f"i{n}") for n in range(10)), gallery_id=3)
    steps = []
    driver: Any = connection.connection.driver_connection
    driver.set_progress_handler(lambda: steps.append(1), 10)  # after so many of SQLite's instructions

    ask(connection)

    driver.set_progress_handler(None, 0)
    assert 0 < len(steps) < 300


def test_changed_metadata_are_stored_in_the_same_form_as_new_ones(connection: Connection) -> None:
    awkward = {"text": 'д\u2028\x00"', "numbers": [1, 2.5, 1 << 53], "deep": {"none": None, "yes": True}}
    store(connection, new("a", **awkward))

    def written() -> str:
        return connection.execute(select(cast(item.c.metadata, Text))).scalar_one()

    before = written()
    set_metadata(connection, [(live_item(connection, 1, "a"), awkward)], take_seq(connection, 1, 1))

    assert written() == before
    assert live_item(connection, 1, "a").metadata == awkward


def test_numbers_are_taken_in_order_and_never_twice(connection: Connection) -> None:
    insert_gallery(connection, "h")

    assert [take_seq(connection, 1, count) for count in (3, 0, 2, 1)] == [1, 4, 4, 6]
    assert take_seq(connection, 2, 1) == 1
    with pytest.raises(UnknownGallery):
        take_seq(connection, 3, 1)


def test_a_stored_item_is_there_with_one_embedding(connection: Connection) -> None:
    assert store(connection, new("a", 1, "blob", x=1), new("b", 2)) == []

    row = live_item(connection, 1, "a")
    assert (row.id, row.seq, row.metadata, row.blob) == (1, 1, {"x": 1}, "blob")
    assert feed(connection) == [(1, 1, 1.0), (2, 1, 2.0)]
    assert gallery_row(connection, 1).next_seq == 3


def test_a_replaced_item_keeps_its_key_and_nothing_else(connection: Connection) -> None:
    store(connection, new("a", 1, "old", x=1), new("b", 2))
    put(connection, 1, 2)

    orphans = store(connection, new("c", 3), new("a", 9, "new"), version_id=2)

    assert orphans == ["old"]
    row = live_item(connection, 1, "a")
    assert (row.id, row.seq, row.metadata, row.blob) == (1, 4, {}, "new")
    assert connection.execute(select(embedding.c.version_id).where(embedding.c.item_id == 1)).all() == [(2,)]
    assert feed(connection, 2) == [(3, 2, 3.0), (1, 2, 9.0)]


def put(connection: Connection, item_id: int, version_id: int, origin: str = "transformed") -> None:
    put_embeddings(connection, 1, version_id, origin, [item_id], np.full((1, 2), 5, np.float32))


def test_every_item_gets_its_own_row_whatever_the_order_of_the_keys(connection: Connection) -> None:
    store(connection, *[new(str(n)) for n in range(300)])
    keys = np.random.default_rng(0).permutation(300) + 1
    vectors = np.random.default_rng(1).normal(size=(300, 3)).astype(np.float32)
    side = np.arange(600, dtype=np.float32).reshape(300, 2)

    put_embeddings(connection, 1, 2, "encoded", keys.tolist(), vectors, side, np.linspace(0, 1, 300))

    rows = connection.execute(select(embedding).where(embedding.c.version_id == 2).order_by(embedding.c.item_id)).all()
    order = np.argsort(keys)
    assert [row.item_id for row in rows] == sorted(keys)
    assert {row.origin for row in rows} == {"encoded"}
    np.testing.assert_array_equal(vectors[order], from_bytes([row.vector for row in rows], 3))
    np.testing.assert_array_equal(side[order], from_bytes([row.side for row in rows], 2))
    assert [row.uncertainty for row in rows] == np.linspace(0, 1, 300)[order].tolist()


@pytest.mark.parametrize("times", [1, 2])
def test_items_without_side_information_get_none_beside_those_that_have_some(
    connection: Connection, times: int
) -> None:
    sides = {"text": None, "image": [1.0, 2.0], "other text": None, "other": [3.0, 4.0]}
    items = [
        NewItem(name, {}, "encoded", np.full(2, n, np.float32), side=side and np.array(side, np.float32))
        for n, (name, side) in enumerate(sides.items())
    ]
    for _ in range(times):
        store(connection, *items)

    held = select(item.c.external_id, embedding.c.side, embedding.c.vector).join(embedding, of_item())
    found = {row.external_id: (row.side, row.vector) for row in connection.execute(held)}
    assert {name: side and from_bytes([side], 2)[0].tolist() for name, (side, _) in found.items()} == sides
    assert [from_bytes([found[name][1]], 2)[0, 0] for name in sides] == [0, 1, 2, 3]


def test_embeddings_of_one_item_and_version_replace_each_other(connection: Connection) -> None:
    store(connection, new("a", 1))

    put(connection, 1, 2)
    put(connection, 1, 1, "supplied")
    put(connection, 1, 2, "encoded")
    put_embeddings(connection, 1, 2, "encoded", [], np.empty((0, 2), np.float32))

    rows = connection.execute(select(embedding.c.version_id, embedding.c.origin).order_by(embedding.c.version_id)).all()
    assert rows == [(1, "supplied"), (2, "encoded")]


def test_a_deleted_item_leaves_a_tombstone_only(connection: Connection) -> None:
    store(connection, new("a", 1, "blob"), new("b", 2), new("c", 3))

    assert delete_items(connection, 1, ["a", "c", "x"]) == ({"a", "c"}, ["blob"])

    with pytest.raises(UnknownItem):
        live_item(connection, 1, "a")
    assert feed(connection, 3) == [(1, None, None), (3, None, None)]
    assert feed(connection, 0) == [(2, 1, 2.0)]
    assert connection.execute(select(embedding.c.item_id)).all() == [(2,)]
    assert delete_items(connection, 1, ["a"]) == (set(), [])
    assert connection.execute(select(item.c.blob, item.c.metadata).where(item.c.id == 1)).one() == (None, {})


def test_an_item_without_its_embedding_stays_in_the_feed(connection: Connection) -> None:
    store(connection, new("a", 1))
    connection.execute(embedding.delete())

    assert feed(connection) == [(1, None, None)]


def test_pages_pass_over_deleted_items(connection: Connection) -> None:
    store(connection, *[new(str(n)) for n in range(6)])
    delete_items(connection, 1, ["1", "2"])

    assert [row.external_id for row in items_after(connection, 1, 1, 2)] == ["3", "4"]
    assert [row.external_id for row in items_after(connection, 1, 5, 2)] == ["5"]


def test_more_items_than_a_statement_takes(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "BLOCK", 7)
    monkeypatch.setattr(change_feed, "FEED_BLOCK", 4)
    items = [new(str(n), n) for n in range(30)]

    store(connection, *items)
    store(connection, *items[5:])

    # The last item of a block waits for the next one, which may hold more of its embeddings.
    assert [len(block) for block in changes(connection, 1, 0)] == [3, *[4] * 6, 2, 1]
    put(connection, 4, 2)
    blocks = [[row[0] for row in block] for block in changes(connection, 1, 0)]
    assert (blocks[0], blocks[1][:2]) == ([1, 2, 3], [4, 4])
    assert delete_items(connection, 1, [str(n) for n in range(30)])[0] == {str(n) for n in range(30)}


def test_a_gallery_goes_with_all_that_is_its_own(connection: Connection) -> None:
    insert_gallery(connection, "h")
    for gallery_id in (1, 2):
        store(connection, new("a", 1), gallery_id=gallery_id)
    store(connection, new("b", 1))

    delete_gallery(connection, 1)

    with pytest.raises(UnknownGallery):
        gallery_named(connection, "g")
    with pytest.raises(UnknownGallery):
        delete_gallery(connection, 1)
    assert gallery_row(connection, 1) is None
    assert insert_gallery(connection, "g") == 3  # the name is free, the number is not
    assert live_item(connection, 2, "a").id == 2
    assert (free_items(connection, 2, 0, 5), deleted_galleries(connection)) == (None, [1])
    assert [free_items(connection, 1, after, 1) for after in (0, 1, 3)] == [1, 3, None]
    forget_gallery(connection, 1)
    forget_gallery(connection, 2)
    assert deleted_galleries(connection) == []
    assert connection.execute(select(embedding.c.item_id)).all() == [(2,)]
