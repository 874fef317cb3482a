from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, delete, insert, select, update

from service.errors import NoCurrentVersion, UnknownGallery
from service.replica import index_files, loading, replica
from service.replica.feed import FeedChanges, gather_changes
from service.replica.loaded import LoadedGallery
from service.store.galleries.deletion import delete_gallery
from service.store.galleries.gallery import gallery_states, take_seq
from service.store.tables import embedding, gallery, item
from staging.inputs.builders import make_version
from staging.states.replicated import ReplicatedWorld as World
from staging.waiting import until

NOBODY: frozenset[str] = frozenset()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, make_version)
    yield made
    made.database.close()


def found(loaded: LoadedGallery, query: list[float], k: int, version: str | None = None) -> list[int]:
    vectors = {2: np.asarray([query[:2]], np.float32), 3: np.asarray([[*query, 0][:3]], np.float32)}
    answer = loaded.gallery.search(version, lambda name: vectors[2 if name == "v1" else 3], k, encoders=NOBODY)
    return [int(key) for key in answer.keys_QK[0] if key >= 0]


def test_a_replica_started_later_answers_as_one_that_followed(world: World) -> None:
    g = world.create()
    world.replica.start()
    world.store(g, 1, a=[1, 0], b=[0, 1], c=[0.6, 0.8])
    world.store(g, 2, d=[0.8, 0.6, 0], b=[1, 0, 0])
    world.delete(g, "a")
    world.replica.refresh(g)
    followed = world.replica.find("g")
    world.replica.stop()

    later = world.new_replica()
    later.start()
    rebuilt = later.find("g")
    later.stop()

    assert followed.gallery.items_by_version() == rebuilt.gallery.items_by_version() == {"v1": 1, "v2": 2}
    assert found(followed, [1, 0.1], 3, "v2") == found(rebuilt, [1, 0.1], 3, "v2") == [2, 4, 3]
    assert (followed.seq, followed.current and followed.current.name) == (rebuilt.seq, "v1")


def test_applying_the_feed_again_changes_nothing(world: World) -> None:
    g = world.create()
    world.store(g, 1, a=[1, 0], b=[0, 1])
    world.store(g, 2, a=[1, 0, 0])
    world.delete(g, "b")
    world.replica._poll()
    loaded = world.replica.find("g")
    before = loaded.gallery.items_by_version(), found(loaded, [1, 0], 1, "v2")

    for seq in range(loaded.seq, -1, -1):
        loaded.gallery.apply({}, seq=seq)
        world.replica.refresh(g)

    assert before == (loaded.gallery.items_by_version(), found(loaded, [1, 0], 1, "v2"))


def test_items_of_one_version_are_kept_apart_by_their_origin(world: World) -> None:
    g = world.create()
    world.store(g, 1, a=[1, 0], b=[0, 1])
    with world.database.write() as connection:
        connection.execute(update(embedding).where(embedding.c.item_id == 2).values(origin="transformed"))
    world.replica._poll()
    loaded = world.replica.find("g")
    shards = {origin: shard.count() for (_, origin), shard in loaded.gallery._shards.serving().items()}
    assert (shards, loaded.gallery.items_by_version()) == ({"supplied": 1, "transformed": 1}, {"v1": 2})


def test_refresh_sees_everything_committed_before_it(world: World) -> None:
    g = world.create()
    world.replica._poll()
    loaded = world.replica.find("g")
    failures = []

    def work(number: int) -> None:
        for turn in range(10):
            world.store(g, 1, **{f"{number}-{turn}": [1, turn / 10]})
            world.replica.refresh(g)
            with world.database.lookup() as connection:
                keys = connection.execute(item.select().where(item.c.external_id == f"{number}-{turn}")).one().id
            try:
                loaded.gallery._shards.serving()["v1", "supplied"].fetch([keys])
            except KeyError:
                failures.append(keys)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert loaded.gallery.items_by_version() == {"v1": 40}


def test_python_looks_for_no_circles_among_rows_that_are_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look through all rows again and again: two thirds of the time that loading a million items takes."""
    collecting: list[bool] = []
    for module in (loading, replica):
        monkeypatch.setattr(
            module, "gather_changes", lambda *given: collecting.append(gc.isenabled()) or gather_changes(*given)
        )
    g = world.create("g")
    world.store(g, 1, a=[1, 0])

    world.replica.find("g")
    world.store(g, 1, b=[1, 0])
    world.replica._poll()

    assert collecting == [False, False, False]  # a block, what follows the last one, and a change
    assert gc.isenabled()


def test_it_follows_what_other_processes_write(world: World) -> None:
    world.replica.start()
    try:
        g = world.create("g")
        loaded = world.replica.find("g")
        world.store(g, 1, a=[1, 0])
        until(lambda: loaded.gallery.items_by_version() == {"v1": 1})
        with world.database.write() as connection:
            connection.execute(update(gallery).values(current_id=2))
        until(lambda: found(world.replica.find("g"), [1, 0], 1) == [1])
        with world.database.write() as connection:
            delete_gallery(connection, g)
        until(lambda: world.replica.all() == [], seconds=5)
        with pytest.raises(UnknownGallery):
            world.replica.find("g")
    finally:
        world.replica.stop()
    assert not world.replica._thread.is_alive()


def test_a_start_without_its_edges_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.replica._registry, "sync_edges", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        world.replica.start()


def test_segments_of_galleries_that_do_not_exist_are_swept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [world.settings.indexes / str(number) for number in (world.create(), 98, 99)]
    for folder in folders[:2]:
        folder.mkdir(parents=True)

    def late(connection: Connection) -> Any:
        states = gallery_states(connection)
        folders[2].mkdir()  # of a gallery that another process has just created
        return states

    monkeypatch.setattr(index_files, "gallery_states", late)
    world.replica.sweep_indexes()

    assert [folder.exists() for folder in folders] == [True, False, True]


def test_what_another_version_would_serve_counts_what_was_just_stored(world: World) -> None:
    g = world.create()
    world.replica.find("g")
    world.store(g, 1, a=[1, 0], b=[0, 1])
    assert world.replica.items_by_version(g, ["v2", "v1"]) == {"v1": 2}
    with world.database.write() as connection:
        vector = np.asarray([1, 0, 0], "<f4").tobytes()
        connection.execute(insert(embedding).values(item_id=1, version_id=2, origin="encoded", vector=vector))
        connection.execute(update(item).where(item.c.id == 1).values(seq=take_seq(connection, g, 1)))
    v2 = world.replica._registry.by_id(2)
    assert world.replica.moving(g, v2) == 1


def test_a_look_reads_the_galleries_only_after_something_was_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = world.create()
    looks: list[int] = []
    monkeypatch.setattr(replica, "gallery_states", lambda *those: looks.append(1) or gallery_states(*those))
    world.replica.find("g")

    def looked(times: int = 3) -> int:
        looks.clear()
        for _ in range(times):
            world.replica._poll()
        return len(looks)

    assert (looked(), looked()) == (1, 0)
    world.store(g, 1, a=[1, 0])
    assert looked() == 1
    assert world.replica.find("g").gallery.items_by_version() == {"v1": 1}
    monkeypatch.setattr(LoadedGallery, "apply", lambda *_: 1 / 0)
    world.store(g, 1, b=[1, 0])
    assert looked() == 3
    monkeypatch.undo()
    world.replica._poll()
    assert world.replica.find("g").gallery.items_by_version() == {"v1": 2}


def test_an_item_without_its_embedding_is_reported_until_it_has_one(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    g = world.create()
    world.store(g, 1, a=[1, 0], b=[0, 1])
    with world.database.write() as connection:
        connection.execute(embedding.delete().where(embedding.c.item_id == 1))
    world.replica._poll()
    loaded = world.replica.find("g")

    def degraded() -> list[tuple[str, int]]:
        answer = loaded.gallery.search("v1", lambda _: np.asarray([[1, 0]], np.float32), 1, encoders=NOBODY)
        return [(d.version, d.items) for d in answer.degraded]

    assert degraded() == [("v1", 1)]
    assert loaded.gallery.items_by_version() == {"v1": 1}
    assert "no embedding" in caplog.text

    world.store(g, 1, a=[1, 0])
    world.replica.refresh(g)

    assert degraded() == []
    assert loaded.gallery.items_by_version() == {"v1": 2}


def test_a_database_that_is_an_older_one_since_is_read_anew(world: World) -> None:
    """As after a failover to a standby that lacked the last writes."""
    g = world.create()
    world.store(g, 1, a=[1, 0])
    with world.database.lookup() as connection:
        (older,) = connection.execute(select(gallery.c.next_seq)).one()
    world.store(g, 1, a=[0, 1], b=[0.6, 0.8])
    assert found(world.replica.find("g"), [0, 1], 2) == [1, 2]
    with world.database.write() as connection:
        connection.execute(delete(embedding).where(embedding.c.item_id == 2))
        connection.execute(delete(item).where(item.c.id == 2))
        connection.execute(update(item).values(seq=older - 1))
        connection.execute(update(gallery).values(next_seq=older))

    world.replica._poll()

    assert found(world.replica.find("g"), [0, 1], 2) == [1]
    world.store(g, 1, c=[1, 0])
    world.replica._poll()
    assert world.replica.find("g").gallery.items_by_version() == {"v1": 2}


def test_a_gallery_that_cannot_be_followed_does_not_hold_up_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = world.create("bad"), world.create("good")
    world.replica.find("bad")
    world.store(bad, 1, a=[1, 0])
    apply = LoadedGallery.apply

    def fail(loaded: LoadedGallery, *found: Any) -> None:
        if loaded.name == "bad":
            raise ValueError("damaged")
        apply(loaded, *found)

    monkeypatch.setattr(LoadedGallery, "apply", fail)
    world.replica._thread.start()
    try:
        world.store(good, 1, b=[0, 1])
        until(lambda: world.replica.failure is not None)
        world.create("late")
        assert world.replica.find("late").gallery.items_by_version() == {}
        assert world.replica.find("good").gallery.items_by_version() == {"v1": 1}
        assert caplog.text.count("feed_not_followed") == 1
        monkeypatch.undo()
        until(lambda: world.replica.failure is None)
        assert world.replica.find("bad").gallery.items_by_version() == {"v1": 1}
    finally:
        world.replica.stop()


def test_without_a_current_version_only_named_versions_ask(world: World) -> None:
    g = world.create(current=None)
    world.store(g, 1, a=[1, 0])
    world.replica._poll()

    assert found(world.replica.find("g"), [1, 0], 1, "v1") == [1]
    with pytest.raises(NoCurrentVersion):
        world.replica.find("g").check_current()


def test_an_answer_never_mixes_a_deployment_with_the_time_before(world: World) -> None:
    """Items and current version change together: whoever asks by the current version always finds all by one route."""
    g = world.create()
    world.store(g, 1, a=[1, 0], b=[0, 1])
    with world.database.write() as connection:
        for key in (1, 2):
            vector = np.asarray([key == 1, key == 2, 0], "<f4").tobytes()
            values = {"item_id": key, "version_id": 2, "origin": "encoded", "vector": vector}
            connection.execute(insert(embedding).values(**values))
    world.replica._poll()
    loaded = world.replica.find("g")
    seen, stop = set(), threading.Event()
    vectors = {"v1": np.asarray([[1, 0]], np.float32), "v2": np.asarray([[1, 0, 0]], np.float32)}

    def ask() -> None:
        while not stop.is_set():
            answer = loaded.gallery.search(None, lambda name: vectors[name], 2, encoders=NOBODY)
            seen.add((answer.version, tuple(answer.items_by_version.items()), bool(answer.degraded)))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(3000):
        current = 1 + (turn + 1) % 2
        with world.database.write() as connection:
            take_seq(connection, g, 1)
            connection.execute(update(gallery).values(current_id=current))
        world.replica.refresh(g)
        if turn >= 30 and len(seen) > 1:  # on a busy machine the threads may be late
            break
    stop.set()
    for thread in threads:
        thread.join()

    assert seen == {("v1", (("v1", 2),), False), ("v2", (("v2", 2),), False)}


def test_a_rebuild_reads_in_blocks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    g = world.create()
    world.store(g, 1, **{f"i{n}": [1, n] for n in range(25)})
    monkeypatch.setattr("service.store.galleries.change_feed.FEED_BLOCK", 10)
    sizes: list[int] = []
    apply = LoadedGallery.apply

    def counting(loaded: LoadedGallery, found: FeedChanges, *seq: int) -> None:
        sizes.append(len(found.items))
        apply(loaded, found, *seq)

    monkeypatch.setattr(LoadedGallery, "apply", counting)
    world.replica.find("g")
    assert sizes == [9, 10, 5, 1, 0]

    world.store(g, 1, **{f"i{n}": [1, n] for n in range(25)})
    world.replica.refresh(g)

    assert sizes == [9, 10, 5, 1, 0, 25]
    assert world.replica.find("g").gallery.items_by_version() == {"v1": 25}


def test_what_was_read_later_is_not_overwritten_by_what_was_read_earlier(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = world.create()
    world.store(g, 1, a=[1, 0])
    world.replica._poll()
    loaded, apply = world.replica.find("g"), LoadedGallery.apply
    read, go = threading.Event(), threading.Event()

    def late(loaded: LoadedGallery, *about: Any) -> None:
        if not read.is_set():
            read.set()
            assert go.wait(5)
        apply(loaded, *about)

    monkeypatch.setattr(LoadedGallery, "apply", late)
    world.store(g, 1, b=[1, 0])
    slow = threading.Thread(target=world.replica.refresh, args=(g,))
    slow.start()
    assert read.wait(5)
    world.delete(g, "b")
    quick = threading.Thread(target=world.replica.refresh, args=(g,))
    quick.start()
    quick.join(0.2)  # it waits for the other, or has applied the newer state by now
    go.set()
    slow.join()
    quick.join()

    assert loaded.gallery.items_by_version() == {"v1": 1}
