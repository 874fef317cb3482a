"""A start takes the vectors of what was sealed from the segments' files, wherever the database's digests say so."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, event, update

from index.engines.config import IndexConfig, IndexKind
from index.engines.memory import segments
from index.engines.remote.base import EngineUnavailable
from index.errors import DeviceUnavailable
from service.replica import loading
from service.runtime import running
from service.settings import Settings
from service.store.galleries.change_feed import feed_of
from service.store.galleries.gallery import insert_gallery, set_index
from service.store.tables import embedding
from service.store.vectors.codec import digests_to_bytes, to_bytes
from staging.external.fake_engine import FakeCollection, FakeEngine
from staging.inputs.builders import make_version
from staging.states.replicated import ReplicatedWorld as World
from staging.states.small_shards import index_few

ROWS = 40
QUERY = np.array([[0.6, 0.8]], np.float32)


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A gallery whose items are all in segments on disk."""
    index_few(monkeypatch, 10)
    monkeypatch.setattr(segments, "SEAL_ROWS", 10)
    monkeypatch.setattr("service.store.galleries.contents.ITEMS_PER_BLOCK", 7)
    world = World(tmp_path, make_version)
    g = world.create()
    angles = np.linspace(0, 3, ROWS)
    world.store(g, 1, **{f"i{n}": [np.cos(angle), np.sin(angle)] for n, angle in enumerate(angles)})
    world.replica.refresh(g)
    gallery = world.replica.find("g").gallery
    while gallery.build_index():
        pass
    assert gallery.indexed_count() == ROWS
    yield world
    world.database.close()


def test_a_load_that_an_engine_holds_up_ends_and_keeps_nobody_from_other_galleries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, engine = World(tmp_path, make_version), FakeEngine()
    held, other = world.create("held"), world.create("other")
    with world.database.write() as connection:
        set_index(connection, held, IndexConfig(kind=IndexKind.PGVECTOR))
    for gallery in (held, other):
        world.store(gallery, 1, a=[1, 0], b=[0, 1])
    asked, frozen = threading.Event(), threading.Event()

    def entries(*_: object) -> None:
        asked.set()
        assert frozen.wait(10)
        raise EngineUnavailable("no answer in time")

    monkeypatch.setattr(FakeCollection, "entries", entries)
    replica = world.new_replica(collections_of=lambda row: lambda _kind, *where: engine.collection(row.name, *where))
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(replica.find, "held")
        assert asked.wait(10)
        assert [key for key, _ in answer(replica.find("other").gallery)] == [4, 3]
        assert replica.progress("held") is not None
        frozen.set()
        loaded = loading.result()
    with pytest.raises(EngineUnavailable, match="in time"):
        answer(loaded.gallery)
    world.store(held, 1, c=[1, 1])
    replica.refresh(held)
    contents = loaded.gallery.contents()
    assert contents is not None
    assert contents[0].keys_N.tolist() == [1, 2, 5]  # writes go on
    world.database.close()


def started(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """The gallery after another start, and the keys of the vectors that were read for it."""
    read: list[int] = []

    def noting(connection: Any, gallery_id: int, keys: Sequence[int]) -> Any:
        read.extend(keys)
        return feed_of(connection, gallery_id, keys)

    monkeypatch.setattr(loading, "feed_of", noting)
    return world.new_replica().find("g").gallery, sorted(read)


def answer(gallery: Any) -> list[tuple[int, float]]:
    found = gallery.search("v1", lambda _: QUERY, ROWS, encoders=frozenset(), exact=True)
    return [(int(k), round(float(s), 6)) for k, s in zip(found.keys_QK[0], found.scores_QK[0], strict=True)]


def test_what_is_sealed_is_not_read_again(sealed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answer(sealed.replica.find("g").gallery)
    after, read = started(sealed, monkeypatch)
    assert (read, after.indexed_count()) == ([], ROWS)
    assert answer(after) == before


def test_only_what_the_files_do_not_hold_is_read(sealed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed.store(1, 1, i3=[1, 0], new=[0, 1])
    sealed.store(1, 2, i5=[0, 1, 0])
    sealed.delete(1, "i7")
    with sealed.database.write() as connection:
        connection.execute(update(embedding).where(embedding.c.item_id == 10).values(digest=None))
    sealed.replica.refresh(1)
    after, read = started(sealed, monkeypatch)
    assert read == [4, 6, 10, ROWS + 1]
    assert after.items_by_version() == {"v1": ROWS - 1, "v2": 1}
    assert answer(after) == answer(sealed.replica.find("g").gallery)


def test_files_of_another_life_of_the_database_count_for_nothing(
    sealed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that was restored: the same keys and numbers of the feed, and other vectors."""
    vector = np.array([0.8, -0.6], np.float32)
    with sealed.database.write() as connection:
        values = {"vector": to_bytes(vector), "digest": digests_to_bytes(vector[np.newaxis])}
        connection.execute(update(embedding).where(embedding.c.item_id == 2).values(values))
    after, read = started(sealed, monkeypatch)
    assert read == [2]
    assert dict(answer(after))[2] == pytest.approx(float(vector @ QUERY[0]), abs=1e-6)


def test_a_start_asks_the_database_as_often_however_many_galleries_there_are(tmp_path: Path) -> None:
    world, here, asked = World(tmp_path, make_version), threading.current_thread(), [0]
    world.store(world.create(), 1, a=[1, 0])

    def note(*_: object) -> None:
        asked[0] += threading.current_thread() is here

    def start() -> int:
        asked[0] = 0
        with running(world.settings, migrated=True) as runtime:
            assert len(answer(runtime.replica.find("g").gallery)) == 1
            assert runtime.replica.cache.loaded() == 1
        return asked[0]

    event.listen(Engine, "before_cursor_execute", note)
    try:
        start()  # which makes what the others find
        few = start()
        with world.database.write() as connection:
            for n in range(300):
                insert_gallery(connection, f"g{n}")
        assert start() == few > 0
    finally:
        event.remove(Engine, "before_cursor_execute", note)
        world.database.close()


def test_a_process_that_is_to_search_on_a_gpu_and_has_none_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faiss.get_num_gpus", lambda: 0)
    with pytest.raises(DeviceUnavailable, match="REGRAFT_INDEX_DEVICE=cpu"):
        running(Settings(data=tmp_path, index_device="cuda")).__enter__()
    assert list(tmp_path.iterdir()) == []
