"""Dynamic batching: inputs of concurrent requests go through the model together; see `Batcher`.

No extra thread is used. If a run is free, a request whose inputs are ready leads a batch: it encodes its inputs and
those that others have left in the queue. While all runs are busy, the queue grows, and so do the batches. A leader
waits only while other requests prepare their inputs, at most `wait_seconds` and at most the time of a run, since a
wait could hardly save more; a lone request never waits. An encoder that is faster than waking a thread is not batched.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, Self, TypeVar

HAND_OVER_SECONDS = 0.0002
"""About the time to wake another thread while many are running."""

FORGETTING = 1.05
"""Factor by which the estimated time of a run grows after each slower run."""

X = TypeVar("X")


class Sliceable(Protocol):
    """An array or list with one row per input."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Self: ...


R = TypeVar("R", bound=Sliceable)


class _Request(Generic[X, R]):
    """Inputs that wait for their batch; `turn` is set when it has a result or an error, or shall lead a run."""

    def __init__(self, inputs: Sequence[X]) -> None:
        self.inputs = inputs
        self.turn = threading.Event()
        self.result: R | None = None
        self.error: BaseException | None = None

    def outcome(self) -> R:
        """The rows of these inputs."""
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Batcher(Generic[X, R]):
    """Encodes the inputs of concurrent threads in batches by `encode`; each thread gets its own rows."""

    def __init__(self, encode: Callable[[Sequence[X]], R], *, size: int, wait_seconds: float, runs: int) -> None:
        """Set the limits.

        Args:
            encode: inputs -> one row each; may be called by `runs` threads at a time.
            size: most inputs in a batch; a request with more is a batch alone.
            wait_seconds: how long a batch may wait for requests that are being prepared.
            runs: batches encoded at the same time.
        """
        self._encode = encode
        self._size = size
        self._wait_seconds = wait_seconds
        self._free = runs
        self._lock = threading.Lock()
        self._queue: deque[_Request[X, R]] = deque()
        self._preparing = 0
        self._arrived = threading.Condition(self._lock)
        self._gathering = False
        # Estimated seconds of a run: the minimum, which grows slowly, as a busy machine only makes runs longer.
        self._run_seconds = float("inf")

    def __call__(self, prepare: Callable[[], Sequence[X]]) -> R:
        """The rows of the inputs that `prepare` returns. Raises what `prepare` or encoding these inputs raises."""
        if self._run_seconds < HAND_OVER_SECONDS:
            return self._encode_timed(prepare())
        request = self._prepared(prepare)
        with self._lock:
            self._preparing -= 1
            self._queue.append(request)
            leads = self._take_run()
            self._arrived.notify()
        if not leads:
            request.turn.wait()
            leads = request.result is None and request.error is None
        if leads:
            self._lead(request)
        return request.outcome()

    def _prepared(self, prepare: Callable[[], Sequence[X]]) -> _Request[X, R]:
        with self._lock:
            self._preparing += 1
        try:
            return _Request(prepare())
        except BaseException:
            with self._lock:
                self._preparing -= 1
                self._arrived.notify()
            raise

    def _take_run(self) -> bool:
        """Take a free run, if no batch is being gathered; returns whether the caller leads a batch now."""
        if self._gathering or not self._free:
            return False
        self._free -= 1
        self._gathering = True
        return True

    def _lead(self, own: _Request[X, R]) -> None:
        """Gather a batch with `own` in it, encode it, hand out the rows, and pass the run on."""
        with self._lock:
            self._gather()
            batch = self._batch(own)
            self._gathering = False
            self._pass_on()  # another run may be free
        try:
            self._encode_all(batch)
        except BaseException as error:  # this thread is being ended: the others must not wait for it
            for request in batch:
                request.error = error
            raise
        finally:
            with self._lock:
                self._free += 1
                self._pass_on()
            for request in batch:
                if request is not own:
                    request.turn.set()

    def _gather(self) -> None:
        """Wait, within limits, while others prepare their inputs. Holds the lock except while waiting."""
        until = time.monotonic() + min(self._wait_seconds, self._run_seconds)
        while self._preparing and sum(len(request.inputs) for request in self._queue) < self._size:
            remaining = until - time.monotonic()
            if remaining <= 0 or not self._arrived.wait(remaining):
                return

    def _batch(self, own: _Request[X, R]) -> list[_Request[X, R]]:
        """Take `own` and as many of the oldest requests as fit off the queue."""
        self._queue.remove(own)
        batch, inputs = [own], len(own.inputs)
        while self._queue and inputs + len(self._queue[0].inputs) <= self._size:
            batch.append(self._queue.popleft())
            inputs += len(batch[-1].inputs)
        return batch

    def _encode_timed(self, inputs: Sequence[X]) -> R:
        started = time.monotonic()
        rows = self._encode(inputs)
        self._run_seconds = min(time.monotonic() - started, FORGETTING * self._run_seconds)
        return rows

    def _pass_on(self) -> None:
        if self._queue and self._take_run():
            self._queue[0].turn.set()

    def _encode_all(self, batch: Sequence[_Request[X, R]]) -> None:
        """Encode a batch; on an error, each request separately, so that one cannot fail the others."""
        inputs = [x for request in batch for x in request.inputs]
        try:
            rows = self._encode_timed(inputs)
        except Exception as error:
            if len(batch) == 1:
                batch[0].error = error
                return
            for request in batch:
                self._encode_all([request])
            return
        start = 0
        for request in batch:
            stop = start + len(request.inputs)
            request.result = rows[start:stop]
            start = stop


def free_runs(threads: int) -> int:
    """How many concurrent batches, of `threads` threads each, keep this machine busy."""
    return max(1, (os.cpu_count() or 1) // threads)
