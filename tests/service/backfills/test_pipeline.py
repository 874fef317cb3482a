"""service.backfills.pipeline: chunks in order, failures that cost their own chunk only, and an end that is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from service.backfills.outcome import Outcome
from service.backfills.pipeline import Pipeline


class Job:
    """Chunks 0, 1, 2, ... of three steps each; what became of them."""

    steps_each = 3

    def __init__(self, chunks: int = 1_000_000) -> None:
        self.stop = threading.Event()
        self.waiting = iter(range(chunks))
        self.claimed: list[int] = []
        self.finished: list[int] = []
        self.let_go: list[tuple[int, bool]] = []
        self.steps = 0

    def following(self) -> list[int] | None:
        number = None if self.stop.is_set() else next(self.waiting, None)
        if number is None:
            return None
        self.claimed.append(number)
        return [number]

    def load(self, chunk: list[int]) -> Iterator[Any]:
        for _ in range(self.steps_each):
            yield self.compute

    def compute(self) -> Outcome:
        self.steps += 1
        return [], []

    def finish(self, chunk: list[int], outcome: Outcome) -> None:
        self.finished += chunk

    def give_back(self, chunk: list[int], failed: bool) -> None:
        self.let_go.append((chunk[0], failed))

    def wait_for_the_reader(self) -> None:
        while not self.pipeline._ready.full():  # until it is as far ahead as it may be
            time.sleep(0.001)

    def run(self) -> None:
        self.pipeline = Pipeline(self.following, self.load, self.finish, self.give_back, self.stop)
        self.pipeline.run()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_every_chunk_is_finished_once_and_in_order() -> None:
    job = Job(20)

    job.run()

    assert (job.finished, job.let_go, job.steps) == (list(range(20)), [], 60)


def test_a_step_that_fails_costs_its_own_chunk_only() -> None:
    class Failing(Job):
        def compute(self) -> Outcome:
            super().compute()
            if self.steps == 5:  # the second step of chunk 1, whose third is left out
                raise RuntimeError("no memory")
            return [], []

    job = Failing(4)

    job.run()

    assert (job.finished, job.let_go) == ([0, 2, 3], [(1, True)])


@pytest.mark.parametrize("steps", [1, 3])  # chunks that wait whole, and one that is being read
def test_the_chunk_in_hand_is_finished_when_it_is_told_to_stop_and_no_other(steps: int) -> None:
    class Stopping(Job):
        steps_each = steps

        def compute(self) -> Outcome:
            super().compute()
            if self.steps == 3 * steps:
                self.wait_for_the_reader()
                self.stop.set()
            return [], []

    job = Stopping()

    job.run()

    assert job.finished == [0, 1, 2]
    assert len(job.claimed) > 3
    assert set(job.let_go) == {(number, False) for number in job.claimed[3:]}


@pytest.mark.parametrize("moment", range(1, 10))
def test_it_ends_although_no_chunk_can_be_given_back(moment: int) -> None:
    """A database that is away while the worker is told to stop, at any step."""

    class Away(Job):
        def compute(self) -> Outcome:
            super().compute()
            if self.steps == moment:
                self.wait_for_the_reader()
                self.stop.set()
            return [], []

        def give_back(self, chunk: list[int], failed: bool) -> None:
            raise RuntimeError("the database is away")

    job = Away()

    def run() -> None:
        with suppress(RuntimeError):
            job.run()

    runs = threading.Thread(target=run, daemon=True)
    runs.start()
    runs.join(30)

    assert not runs.is_alive()
    assert readers() == []
