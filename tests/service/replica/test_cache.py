"""Galleries are loaded when asked for, unloaded for room, and never tell less than what was acknowledged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.errors import UnknownGallery
from service.replica.cache import Cache
from service.replica.loading import load_items
from service.replica.replica import Replica
from service.store.galleries.deletion import delete_gallery
from staging.inputs.builders import make_version
from staging.states.replicated import ReplicatedWorld

NAMES = ("a", "b", "c")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ReplicatedWorld]:
    made = ReplicatedWorld(tmp_path, make_version)
    for name in NAMES:
        made.store(made.create(name), 1, one=[1, 0])
    yield made
    made.database.close()


def limited(world: ReplicatedWorld, galleries: float) -> Replica:
    """A replica with room for so many of the galleries."""
    one = world.replica.find("a").bytes
    replica = world.new_replica()
    replica.cache = Cache(int(one * galleries))
    return replica


def loaded_names(replica: Replica) -> list[str]:
    return [name for number, name in enumerate(NAMES, 1) if replica.cache.peek(number)]


def items(replica: Replica, name: str) -> int:
    return sum(replica.find(name).gallery.items_by_version().values())


def test_nothing_is_loaded_before_it_is_asked_for(world: ReplicatedWorld) -> None:
    replica = world.new_replica()
    replica.start()
    try:
        assert loaded_names(replica) == []
        assert items(replica, "b") == 1
        assert loaded_names(replica) == ["b"]
        assert replica.cache.bytes() == replica.find("b").bytes > 0
    finally:
        replica.stop()


def test_the_one_used_longest_ago_goes_first_and_its_memory_with_it(world: ReplicatedWorld) -> None:
    replica = limited(world, 2.5)
    gone = ref(replica.find("a").gallery)
    for name in ("b", "a", "c"):
        replica.find(name)
    assert loaded_names(replica) == ["a", "c"]
    replica.find("b")
    assert loaded_names(replica) == ["b", "c"]
    assert gone() is None  # at once: nothing refers to it in a circle


def test_one_larger_than_the_limit_is_loaded_alone(world: ReplicatedWorld) -> None:
    replica = limited(world, 0.5)
    assert [items(replica, name) for name in (*NAMES, *NAMES)] == [1] * 6
    assert loaded_names(replica) == ["c"]


def test_what_grows_makes_room(world: ReplicatedWorld) -> None:
    replica = limited(world, 3.5)
    assert [items(replica, name) for name in NAMES] == [1, 1, 1]
    world.store(3, 1, **{f"i{n}": [1, n] for n in range(30)})
    replica.refresh(3)
    assert loaded_names(replica) == ["c"]


def test_whoever_works_with_an_unloaded_gallery_sees_what_is_written(world: ReplicatedWorld) -> None:
    replica = limited(world, 1.5)
    loaded = replica.find("a")
    replica.find("b")
    assert loaded_names(replica) == ["b"]
    world.store(1, 1, two=[0, 1])
    replica.refresh(1)
    assert loaded.gallery.items_by_version() == {"v1": 2}
    assert replica.find("a") is loaded


def test_a_write_while_a_gallery_is_loaded_is_seen(world: ReplicatedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load has read its snapshot already when the write commits: nobody gets the gallery without it."""
    replica, reading, go = world.new_replica(), threading.Event(), threading.Event()

    def late(connection: Any, registry: Any, loaded: Any, progress: Any) -> None:
        load_items(connection, registry, loaded, progress)
        if loaded.name == "a":
            reading.set()
            assert go.wait(5)

    monkeypatch.setattr("service.replica.replica.load_items", late)
    seen: list[int] = []
    loading = threading.Thread(target=lambda: seen.append(items(replica, "a")))
    loading.start()
    assert reading.wait(5)
    world.store(1, 1, two=[0, 1])
    assert items(replica, "b") == 1
    replica.refresh(1)
    assert seen == []
    go.set()
    loading.join(5)
    assert seen == [2]


@pytest.mark.parametrize("own", [True, False])
def test_a_gallery_that_is_deleted_while_it_is_loaded_is_unknown(
    world: ReplicatedWorld, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """By this process, which forgets it, or by another one, of which nobody hears."""
    replica = world.new_replica()

    def late(connection: Any, registry: Any, loaded: Any, progress: Any) -> None:
        load_items(connection, registry, loaded, progress)
        with world.database.write() as writing:
            delete_gallery(writing, 1)
        if own:
            replica.forget(1)

    monkeypatch.setattr("service.replica.replica.load_items", late)
    with pytest.raises(UnknownGallery):
        replica.find("a")
    assert replica.cache.loaded() == 0
    assert replica.all() == []


@dataclass
class Loaded:
    id: int = 1
    bytes: int = 1
    used: float = 0.0


def test_what_is_dropped_while_it_is_loaded_is_not_kept() -> None:
    """Its writes are followed, and before it is kept another thread hears that it was deleted."""
    cache = Cache[Loaded](10)

    def follow(_: Loaded) -> bool:
        cache.drop(1)
        return True

    cache.load(1, Loaded, follow)

    assert (cache.peek(1), cache.all()) == (None, [])


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["store", "delete", "ask", "look", "remove"]), st.integers(0, 2), st.integers(0, 3)),
    max_size=25,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10, deadline=None)
@given(actions=ACTIONS, room=st.sampled_from([0.5, 1.5, 2.5]))
def test_any_order_of_writes_and_unloading_tells_what_was_acknowledged(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, int]], room: float
) -> None:
    world = ReplicatedWorld(tmp_path_factory.mktemp("w"), make_version)
    numbers = {name: world.create(name) for name in NAMES}
    world.store(numbers["a"], 1, one=[1, 0])
    held: dict[str, set[str]] = {"a": {"one"}, "b": set(), "c": set()}
    replica = limited(world, room)
    for action, at, which in actions:
        name, item = NAMES[at], f"i{which}"
        if name not in held:
            continue
        if action == "store":
            world.store(numbers[name], 1, **{item: [1, which]})
            held[name].add(item)
        elif action == "delete":
            world.delete(numbers[name], item)
            held[name].discard(item)
        elif action == "remove":
            with world.database.write() as connection:
                delete_gallery(connection, numbers[name])
            del held[name]
        elif action == "look":
            replica._poll()
        replica.refresh(numbers[name])
        for other in NAMES:
            if other in held:
                assert items(replica, other) == len(held[other])
            else:
                with pytest.raises(UnknownGallery):
                    replica.find(other)
        assert replica.cache.loaded() == 1 or replica.cache.bytes() <= replica.cache.limit
    world.database.close()
