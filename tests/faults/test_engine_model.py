"""The random operations of `test_model.py` on a gallery in an engine that is late and goes away, in one process.

A short twin of `test_engine_states.py`: what it brings is kept in memory, and it is away by a word.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from service.backfills import attempts
from service.replica import engine_writer, engines
from staging.external.fake_engine import FakeCollection, FakeEngine
from staging.random_operations.run import IDS, Run
from staging.random_operations.world import World
from staging.waiting import until

STEPS = ("upgrade", "work", "store_embeddings", "strike", "race", "delete", "roll_back")
"""What is done to it by chance is chosen by chance within each."""


class Locked:
    """A collection that the threads of a service ask one after the other."""

    def __init__(self, collection: FakeCollection, lock: threading.RLock) -> None:
        self._collection, self._lock = collection, lock
        self.capabilities = collection.capabilities

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            with self._lock:
                return getattr(self._collection, name)(*given, **more)

        return call


class LockedEngine(FakeEngine):
    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.lock = threading.RLock()

    def collection(self, *place: Any) -> Any:
        with self.lock:
            return Locked(super().collection(*place), self.lock)

    def deliver(self) -> None:
        """Some of what was written comes."""
        with self.lock:
            for one in self.collections.values():
                one.deliver()

    def go(self, away: bool) -> None:
        for one in self.collections.values():
            one.away = away


class EngineRun(Run):
    """The life of a gallery in that engine."""

    engine: LockedEngine

    def whole(self) -> bool:
        files = [("images", ("q", self.world.as_bytes(0)))]
        answer = self.http.post("/galleries/g/query", files=files).json()
        assert answer.get("code", "engine_unavailable") == "engine_unavailable"
        return "code" not in answer and not answer["degraded"]

    def check(self) -> None:
        self.engine.deliver()
        super().check()

    def strike(self) -> None:
        """The engine goes; the service takes a write, starts anew and takes another; the engine is back."""
        self.engine.go(away=True)
        self.store(IDS[0])
        self.life.close()
        self.start()
        self.store(IDS[1])
        assert not self.whole()
        self.engine.go(away=False)
        until(lambda: time.sleep(0.1) or self.whole())  # each look is a query


def test_any_life_of_a_gallery_in_an_engine_is_as_the_model_says(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(engine_writer, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("service.store.galleries.change_feed.FEED_BLOCK", 3)
    EngineRun.engine = LockedEngine(Random(0))
    monkeypatch.setattr(engines, "_pgvector", lambda _: EngineRun.engine)
    with ExitStack() as stack:
        run = EngineRun(world, tmp_path / "data", 0, stack, pgvector_url="postgresql://fake")
        stack.callback(run.end)
        world.register(run.http)
        run.post(None, "/galleries", name="g", index={"kind": "pgvector"})
        run._begin("v1")
        for name in IDS[:8]:
            run.store(name)
        for step in STEPS:
            getattr(run, step)()
            run.check()
        run.finish()
    there = sum(len(one.rows) for one in EngineRun.engine.collections.values())
    assert there >= 8
    assert run.model.moves >= 5
