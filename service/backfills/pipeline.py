"""Three steps of a worker side by side: a thread reads ahead, the caller computes, a thread commits behind.

Chunks are finished one by one in the order they were claimed. What fails costs its own chunk only: it is let go, and
whoever claims it when its lease has run out tries again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, Queue
from typing import Generic, TypeVar

from index.errors import RegraftError
from index.events import Event
from service.backfills.embedder import collect
from service.backfills.outcome import Compute, Outcome
from service.logs import RecurringErrors

logger = logging.getLogger(__name__)

READ_AHEAD = 2
"""Encoder inputs that wait in memory: enough that neither side waits for the other's slower moments."""
PAUSE_SECONDS = 0.5
"""The pause after something failed."""
WAKE_SECONDS = 0.5

C = TypeVar("C")


class Pipeline(Generic[C]):
    """Works until there is no chunk any more."""

    def __init__(
        self,
        following: Callable[[], C | None],
        load: Callable[[C], Iterable[Compute]],
        finish: Callable[[C, Outcome], None],
        let_go: Callable[[C, bool], None],
        stop: threading.Event,
    ) -> None:
        """Put the parts of a worker together.

        Args:
            following: claims the next chunk, waiting for it; None ends the work.
            load: reads a chunk, a step at a time.
            finish: commits a chunk.
            let_go: takes a chunk that is not to be finished, and whether it failed.
            stop: when it is set, the chunk that is being computed is finished and no other.
        """
        self._following, self._load, self._finish, self._let_go = following, load, finish, let_go
        self._stop = stop
        self._errors = RecurringErrors(logger)
        self._ready: Queue[tuple[C, Compute | Exception | None] | None] = Queue(READ_AHEAD)
        self._in_hand: C | None = None

    def run(self) -> None:
        """Work in this thread."""
        reader = threading.Thread(target=self._read_ahead, name="read-ahead")
        reader.start()
        try:
            with ThreadPoolExecutor(1, "commit") as committer:
                self._compute(committer)
        except BaseException:
            self._stop.set()
            raise
        finally:
            self._see_off(reader)

    def _compute(self, committer: ThreadPoolExecutor) -> None:
        outcome: Outcome = ([], [])
        refused: C | None = None
        committing: Future[None] | None = None
        while (step := self._take()) is not None:
            chunk, compute = step
            if chunk is refused:
                continue
            if chunk is not self._in_hand:
                if self._stop.is_set():
                    refused = chunk
                    self._let_go(chunk, False)
                    continue
                self._in_hand, outcome = chunk, ([], [])
            try:
                if isinstance(compute, Exception):
                    raise compute  # noqa: TRY301 - one place for what goes wrong while reading and while computing
                if compute is not None:
                    collect(outcome, compute())
                    continue
            except Exception as error:
                # An error of ours says what is wrong: an outage would fill the log with traces.
                logger.error(Event("step_failed", reason=error), exc_info=not isinstance(error, RegraftError))  # noqa: TRY400
                refused = chunk
                self._let_go(chunk, True)
                continue
            if committing is not None:
                committing.result()
            committing = committer.submit(self._commit, chunk, outcome)

    def _see_off(self, reader: threading.Thread) -> None:
        """Wait for the reader's end; one that still has something to hand over must find room for it."""
        while reader.is_alive():
            with suppress(Empty):
                self._ready.get_nowait()
            reader.join(PAUSE_SECONDS / 10)

    def _take(self) -> tuple[C, Compute | Exception | None] | None:
        while True:
            try:
                # A signal that another thread received is handled when this one, the main thread, next wakes up.
                return self._ready.get(timeout=WAKE_SECONDS)
            except Empty:
                continue

    def _commit(self, chunk: C, outcome: Outcome) -> None:
        try:
            self._finish(chunk, outcome)
        except Exception:
            logger.exception(Event("step_failed"))
            self._let_go(chunk, True)

    def _read_ahead(self) -> None:
        while True:
            try:
                chunk = self._following()
            except Exception:
                self._errors.log(Event("step_failed"))
                if self._stop.wait(PAUSE_SECONDS):
                    break
                continue
            if chunk is None:
                break
            self._read(chunk)
        self._ready.put(None)

    def _read(self, chunk: C) -> None:
        try:
            for compute in self._load(chunk):
                if self._stop.is_set() and self._in_hand is not chunk:
                    self._let_go(chunk, False)
                    return
                self._ready.put((chunk, compute))
        except Exception as error:
            self._ready.put((chunk, error))
            self._stop.wait(PAUSE_SECONDS)
        else:
            self._ready.put((chunk, None))
