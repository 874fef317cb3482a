"""What is loaded before a process says that it is ready, whatever goes wrong meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from service.replica import preload, replica
from service.replica.loading import load_items
from service.replica.preload import EVERY, Preload
from staging.inputs.builders import make_version
from staging.states.replicated import ReplicatedWorld
from staging.waiting import until


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplicatedWorld]:
    monkeypatch.setattr(preload, "PAUSE_SECONDS", 0.01)
    made = ReplicatedWorld(tmp_path, make_version)
    for name in ("a", "b"):
        made.store(made.create(name), 1, one=[1, 0])
    yield made
    made.database.close()


def count_loaded(world: ReplicatedWorld) -> int:
    """How many galleries are loaded once it is done."""
    follower = world.new_replica()
    one = Preload(world.database, follower, [EVERY])
    one.start()
    try:
        until(lambda: one.loading is None)
    finally:
        one.stop()
    return follower.cache.loaded()


@pytest.mark.parametrize(("module", "name"), [(preload, "all_galleries"), (replica, "gallery_named")])
def test_a_database_that_was_away_is_asked_again(
    world: ReplicatedWorld, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    ask, asked = getattr(module, name), [0]

    def away_at_first(*args: Any) -> Any:
        asked[0] += 1
        if asked[0] <= 2:
            raise OperationalError("SELECT", {}, ConnectionError("gone"))
        return ask(*args)

    monkeypatch.setattr(module, name, away_at_first)
    assert count_loaded(world) == 2


def test_a_gallery_that_cannot_be_loaded_does_not_hold_up_the_others(
    world: ReplicatedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(connection: Any, registry: Any, loaded: Any, progress: Any) -> None:
        if loaded.name == "a":
            raise ValueError("what nobody expected")
        load_items(connection, registry, loaded, progress)

    monkeypatch.setattr(replica, "load_items", broken)
    assert count_loaded(world) == 1


def test_it_stops_while_the_database_is_away(world: ReplicatedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: Any) -> Any:
        raise OperationalError("SELECT", {}, ConnectionError("gone"))

    monkeypatch.setattr(preload, "all_galleries", away)
    one = Preload(world.database, world.new_replica(), [EVERY])
    one.start()
    one.stop()
    assert one.loading is None


def test_it_loads_as_many_as_fit_into_the_memory(world: ReplicatedWorld) -> None:
    follower = world.new_replica(memory=1)
    one = Preload(world.database, follower, [EVERY])
    one.start()
    until(lambda: one.loading is None)
    assert follower.cache.peek(1) is not None


def test_it_stops_between_two_galleries(world: ReplicatedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    follower, asked = world.new_replica(), []
    one = Preload(world.database, follower, [EVERY])

    def find(name: str) -> None:
        asked.append((name, one.loading))
        threading.Thread(target=one.stop).start()
        one._stop.wait()

    monkeypatch.setattr(follower, "find", find)
    one.start()
    until(lambda: one.loading is None)
    assert asked == [("a", "a")]
