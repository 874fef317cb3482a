"""service.registry.encoders.batching: who is encoded with whom; each gets its own rows whatever happens to others."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import service.registry.encoders.batching
import service.registry.encoders.modalities
from index.encoders.encoder import Encoder
from index.encoders.image import preprocess
from index.errors import InvalidVersionFolder
from index.version import Version
from service.registry.encoders.batching import Batcher
from service.registry.encoders.modalities import ImageModality
from service.settings import Settings
from staging.inputs.builders import make_image
from staging.waiting import until

LONG = 1000.0
"""Seconds: a test that really waited for so long would be stopped."""


class Model:
    """Squares numbers; notes its batches, and stops in each until `go` is set."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Event()
        self.go.set()
        self.running = self.most = 0
        self.quick = False
        self._lock = threading.Lock()

    def __call__(self, inputs: Sequence[int]) -> list[int]:
        with self._lock:
            self.batches.append(list(inputs))
            self.running += 1
            self.most = max(self.most, self.running)
        self.go.wait()
        with self._lock:
            self.running -= 1
        if self.quick:
            return [x * x for x in inputs]
        time.sleep(0.001)  # slower than what is not worth a batch
        if -1 in inputs:
            raise InvalidVersionFolder("minus one")
        return [x * x for x in inputs]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as threads:
        yield threads


def ask(pool: ThreadPoolExecutor, batcher: Batcher[int, list[int]], *inputs: int) -> Future[list[int]]:
    return pool.submit(batcher, lambda: inputs)


def test_a_lone_request_does_not_wait(model: Model) -> None:
    batcher = Batcher(model, size=8, wait_seconds=LONG, runs=1)

    assert batcher(lambda: [3, 4]) == [9, 16]
    assert batcher(lambda: [5]) == [25]

    assert model.batches == [[3, 4], [5]]


def test_what_comes_while_the_model_is_busy_is_encoded_together(model: Model, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(model, size=8, wait_seconds=0, runs=1)
    model.go.clear()
    first = ask(pool, batcher, 1)
    until(lambda: model.batches == [[1]])
    others = []
    for number in range(2, 7):
        others.append(ask(pool, batcher, number))
        until(lambda: len(batcher._queue) == len(others))
    model.go.set()

    assert [f.result() for f in (first, *others)] == [[n * n] for n in range(1, 7)]
    assert model.batches == [[1], [2, 3, 4, 5, 6]]


def test_a_batch_holds_at_most_its_size_and_keeps_requests_whole(model: Model, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(model, size=4, wait_seconds=0, runs=1)
    model.go.clear()
    asked = [(0,), (1, 2, 3), (4, 5), (6, 7), (8,) * 9, (9,)]
    futures = [ask(pool, batcher, *asked[0])]
    until(lambda: len(model.batches) == 1)
    for waiting, inputs in enumerate(asked[1:], 1):
        futures.append(ask(pool, batcher, *inputs))
        until(lambda waiting=waiting: len(batcher._queue) == waiting)  # type: ignore[misc]
    model.go.set()

    assert [f.result() for f in futures] == [[x * x for x in inputs] for inputs in asked]
    assert model.batches == [[0], [1, 2, 3], [4, 5, 6, 7], [8] * 9, [9]]


def test_the_first_waits_for_those_who_are_preparing(model: Model, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(model, size=8, wait_seconds=LONG, runs=1)
    ready = threading.Event()

    def slowly() -> list[int]:
        ready.wait()
        return [7]

    slow = pool.submit(batcher, slowly)
    until(lambda: batcher._preparing == 1)
    quick = ask(pool, batcher, 2)
    until(lambda: len(batcher._queue) == 1)
    ready.set()

    assert (slow.result(), quick.result()) == ([49], [4])
    assert model.batches == [[2, 7]]


def test_the_wait_has_an_end(model: Model, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(model, size=8, wait_seconds=0.01, runs=1)
    ready = threading.Event()
    slow = pool.submit(batcher, lambda: [7] if ready.wait() else [])
    until(lambda: batcher._preparing == 1)

    assert batcher(lambda: [2]) == [4]
    assert not slow.done()
    ready.set()
    assert slow.result() == [49]


def test_nobody_waits_for_a_request_that_failed_to_prepare(model: Model, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(model, size=8, wait_seconds=LONG, runs=1)
    ready = threading.Event()

    def fail() -> list[int]:
        ready.wait()
        raise ValueError("unreadable")

    failing = pool.submit(batcher, fail)
    until(lambda: batcher._preparing == 1)
    quick = ask(pool, batcher, 2)
    until(lambda: len(batcher._queue) == 1)
    ready.set()

    with pytest.raises(ValueError, match="unreadable"):
        failing.result()
    assert quick.result() == [4]
    assert batcher._preparing == 0


def test_inputs_that_are_refused_do_not_fail_the_others(model: Model, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(model, size=8, wait_seconds=0, runs=1)
    model.go.clear()
    first = ask(pool, batcher, 1)
    until(lambda: len(model.batches) == 1)
    others = [ask(pool, batcher, *inputs) for inputs in ((2,), (-1, 5), (3, 4))]
    until(lambda: len(batcher._queue) == 3)
    model.go.set()

    assert first.result() == [1]
    assert (others[0].result(), others[2].result()) == ([4], [9, 16])
    with pytest.raises(InvalidVersionFolder, match="minus one"):
        others[1].result()
    assert ask(pool, batcher, 6).result() == [36]


def test_a_thread_that_is_ended_takes_nobody_with_it_silently(pool: ThreadPoolExecutor) -> None:
    started, go = threading.Event(), threading.Event()

    def end(inputs: Sequence[int]) -> list[int]:
        started.set()
        go.wait()
        if 2 in inputs:
            raise SystemExit
        return list(inputs)

    batcher = Batcher(end, size=8, wait_seconds=0, runs=1)
    first = ask(pool, batcher, 1)
    started.wait()
    ended = [ask(pool, batcher, number) for number in (2, 3)]
    until(lambda: len(batcher._queue) == 2)
    go.set()

    assert first.result() == [1]
    for future in ended:
        with pytest.raises(SystemExit):
            future.result()
    assert ask(pool, batcher, 4).result() == [4]


@pytest.mark.parametrize(("size", "runs", "wait"), [(1, 1, 0), (4, 2, 0.001), (64, 3, 0.01)])
def test_everyone_gets_their_own_rows_and_nothing_is_left(
    model: Model, pool: ThreadPoolExecutor, size: int, runs: int, wait: float
) -> None:
    batcher = Batcher(model, size=size, wait_seconds=wait, runs=runs)
    rng = random.Random(0)
    asked = [tuple(rng.randrange(1000) for _ in range(rng.randrange(1, 6))) for _ in range(300)]
    asked[100] = asked[200] = (-1,)

    futures = [ask(pool, batcher, *inputs) for inputs in asked]

    for inputs, future in zip(asked, futures, strict=True):
        if inputs == (-1,):
            with pytest.raises(InvalidVersionFolder):
                future.result()
        else:
            assert future.result() == [x * x for x in inputs]
    assert model.most <= runs
    assert (list(batcher._queue), batcher._preparing, batcher._free, batcher._gathering) == ([], 0, runs, False)


def test_a_quick_encoder_is_not_batched_until_it_turns_slow(model: Model, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(model, size=8, wait_seconds=LONG, runs=1)
    model.quick = True
    while batcher._run_seconds >= service.registry.encoders.batching.HAND_OVER_SECONDS:
        batcher(lambda: [1])
    model.batches.clear()
    model.go.clear()
    futures = [ask(pool, batcher, number) for number in range(3)]

    until(lambda: len(model.batches) == 3)  # all of them at once, although one run is allowed
    model.go.set()
    assert [future.result() for future in futures] == [[0], [1], [4]]

    model.quick = False
    while batcher._run_seconds < service.registry.encoders.batching.HAND_OVER_SECONDS:
        batcher(lambda: [1])


def test_embeddings_in_batches_are_those_of_one_by_one(
    pool: ThreadPoolExecutor, versions: dict[str, Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.registry.encoders.modalities, "free_runs", lambda threads: 1)
    encoder = Encoder(versions["v1"])
    images = ImageModality(versions["v1"], Settings(batch_wait_ms=50))
    pixels = [preprocess(make_image(n % 5, n), encoder.spec) for n in range(200)]

    monkeypatch.setattr(service.registry.encoders.batching, "HAND_OVER_SECONDS", 0)
    sizes: list[int] = []
    encode = images.queries._encode

    def when_others_wait(batch: Sequence[Any]) -> Any:
        until(lambda: bool(sizes) or len(images.queries._queue) >= 10)
        sizes.append(len(batch))
        return encode(batch)

    monkeypatch.setattr(images.queries, "_encode", when_others_wait)

    answers = pool.map(lambda one: images.queries(lambda: [one]), pixels)

    together = np.concatenate(list(answers))
    alone = np.concatenate([encoder.vectors(one[None]) for one in pixels])
    assert np.abs(together - alone).max() <= 1e-5
    assert sum(sizes) == 200
    assert max(sizes) >= 10
