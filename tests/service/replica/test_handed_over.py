"""What a process has just stored is handed to its replica, and is what the database says, whoever else writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.registry.registry import Registry
from service.registry.storing import UpdateMode, store
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica
from service.store.database.connections import Database
from service.store.galleries.gallery import take_seq
from service.store.galleries.items import NewItem
from staging.inputs.builders import make_version
from staging.states.replicated import ReplicatedWorld


class Process:
    """A process that stores items as a request does: its own connections, registry and replica."""

    def __init__(self, world: ReplicatedWorld, poll_seconds: float = 0.002) -> None:
        self.database = Database(world.settings.database_url)
        self.registry = Registry(self.database, world.settings)
        self.replica = Replica(self.database, self.registry, world.settings.indexes, poll_seconds)
        self.replica.start()

    def store(
        self,
        *names: str,
        number: float = 1,
        metadata: dict[str, Any] | None = None,
        origins: Sequence[str] = ("supplied",),
    ) -> None:
        """Items of these origins in turn."""
        vectors = [np.array([number, n], np.float32) for n in range(len(names))]
        new = [NewItem(*each) for each in zip(names, repeat(metadata), cycle(origins), vectors, strict=False)]
        with self.database.write() as connection:
            first = take_seq(connection, 1, len(new))
            v1 = self.registry.by_id(1)
            stored = store(connection, self.registry, 1, v1, v1, new, first, mode=UpdateMode.UPSERT)
        self.replica.apply_added(1, stored.added)

    def end(self) -> None:
        self.replica.stop()
        self.database.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ReplicatedWorld]:
    made = ReplicatedWorld(tmp_path, make_version)
    made.store(made.create(), 1, first=[1, 0])
    yield made
    made.database.close()


@pytest.fixture
def process(world: ReplicatedWorld) -> Iterator[Process]:
    made = Process(world)
    made.replica.find("g")
    yield made
    made.end()


def told(replica: Replica) -> tuple[int, dict[int, tuple[Any, ...]]]:
    """The feed number, and all that is known of each item, its vector (unit ones of two numbers) as it is found by."""
    loaded: LoadedGallery = replica.find("g")
    queries = np.eye(2, dtype=np.float32)
    answer = loaded.gallery.search("v1", lambda _: queries, 10_000)
    items: dict[int, tuple[Any, ...]] = {key: tuple(item) for key, item in answer.items.items()}
    for keys, scores in zip(answer.keys_QK.tolist(), answer.raw_QK.tolist(), strict=True):
        for key, score in zip(keys, scores, strict=True):
            items[key] += (score,)
    return loaded.seq, items


def test_new_items_are_not_read_back_and_are_what_the_database_says(
    world: ReplicatedWorld, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.replica.stop()  # its thread would read them
    with monkeypatch.context() as patched:
        patched.setattr(Replica, "refresh", None)
        process.store("a", "b", metadata={"n": 1, "é": ["\\", 1e300, 1 << 70, None, {}]})
        process.store("c")
    assert told(process.replica) == told(world.new_replica())

    world.delete(1, "a")  # elsewhere: what comes next is not next in the feed
    process.store("d")
    assert told(process.replica) == told(world.new_replica())

    process.store("a", "e")  # one was there
    process.store("b", "f", number=2)  # one is
    world.create("h")
    process.store("i")

    assert told(process.replica) == told(world.new_replica())


def test_new_items_of_several_origins_are_what_the_database_says(world: ReplicatedWorld, process: Process) -> None:
    process.store("a", "b", "c", "d", origins=("supplied", "encoded"))

    assert told(process.replica) == told(world.new_replica())


def test_several_processes_that_store_at_once_tell_the_same(world: ReplicatedWorld, process: Process) -> None:
    other = Process(world, poll_seconds=60)  # only what it stores itself has it look
    other.replica.find("g")

    def write(by: Process, who: str) -> None:
        for number in range(25):
            by.store(f"{who}{number}", f"{who}{number}b", number=number + 1)
            by.store(f"both{number % 7}", number=number + 2)

    writers = [threading.Thread(target=write, args=one) for one in ((process, "a"), (process, "b"), (other, "c"))]
    for writer in writers:
        writer.start()
    for number in range(25):
        world.store(1, 1, **{f"w{number}": [1, number]})
        world.delete(1, f"w{number - 1}", f"a{number}")
    for writer in writers:
        writer.join(30)

    for one in (process, other):
        one.replica.refresh(1)
        assert told(one.replica) == told(world.new_replica())
    assert len(told(process.replica)[1]) >= 100
    other.end()
