"""Three concurrent steps of a worker: a thread reads ahead, the caller computes, a thread commits the last chunk.

Chunks are finished one by one in the order they were claimed. A failure affects only its chunk, which is given back and
can be claimed again when its lease has expired.
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
"""Batches of encoder inputs that wait in memory, to even out the speeds of reading and computing."""
PAUSE_SECONDS = 0.5
"""The pause after a failure."""
WAKE_SECONDS = 0.5

C = TypeVar("C")


class Pipeline(Generic[C]):
    """Processes chunks until there are no more."""

    def __init__(
        self,
        next_chunk: Callable[[], C | None],
        load: Callable[[C], Iterable[Compute]],
        finish: Callable[[C, Outcome], None],
        give_back: Callable[[C, bool], None],
        stop: threading.Event,
    ) -> None:
        """Combine the steps of a worker.

        Args:
            next_chunk: waits for the next chunk and claims it; None ends the work.
            load: reads a chunk step by step.
            finish: commits a chunk.
            give_back: called with an unfinished chunk, and whether it failed.
            stop: when it is set, only the chunk that is being computed is finished.
        """
        self._next_chunk, self._load, self._finish, self._give_back = next_chunk, load, finish, give_back
        self._stop = stop
        self._errors = RecurringErrors(logger)
        self._ready: Queue[tuple[C, Compute | Exception | None] | None] = Queue(READ_AHEAD)
        self._current: C | None = None

    def run(self) -> None:
        """Process chunks; the calling thread computes."""
        reader = threading.Thread(target=self._read_ahead, name="read-ahead")
        reader.start()
        try:
            with ThreadPoolExecutor(1, "commit") as committer:
                self._compute(committer)
        except BaseException:
            self._stop.set()
            raise
        finally:
            self._join_reader(reader)

    def _compute(self, committer: ThreadPoolExecutor) -> None:
        outcome: Outcome = ([], [])
        returned: C | None = None
        committing: Future[None] | None = None
        while (step := self._take()) is not None:
            chunk, compute = step
            if chunk is returned:
                continue
            if chunk is not self._current:
                if self._stop.is_set():
                    returned = chunk
                    self._give_back(chunk, False)
                    continue
                self._current, outcome = chunk, ([], [])
            try:
                if isinstance(compute, Exception):
                    raise compute  # noqa: TRY301 - one place for what goes wrong while reading and while computing
                if compute is not None:
                    collect(outcome, compute())
                    continue
            except Exception as error:
                # The message of a RegraftError is enough: an outage would fill the log with tracebacks.
                logger.error(Event("step_failed", reason=error), exc_info=not isinstance(error, RegraftError))  # noqa: TRY400
                returned = chunk
                self._give_back(chunk, True)
                continue
            if committing is not None:
                committing.result()
            committing = committer.submit(self._commit, chunk, outcome)

    def _join_reader(self, reader: threading.Thread) -> None:
        """Wait for the reader to end; drain the queue, so that the reader is not blocked."""
        while reader.is_alive():
            with suppress(Empty):
                self._ready.get_nowait()
            reader.join(PAUSE_SECONDS / 10)

    def _take(self) -> tuple[C, Compute | Exception | None] | None:
        while True:
            try:
                # Python handles signals in the main thread, this one: wake up regularly.
                return self._ready.get(timeout=WAKE_SECONDS)
            except Empty:
                continue

    def _commit(self, chunk: C, outcome: Outcome) -> None:
        try:
            self._finish(chunk, outcome)
        except Exception:
            logger.exception(Event("step_failed"))
            self._give_back(chunk, True)

    def _read_ahead(self) -> None:
        while True:
            try:
                chunk = self._next_chunk()
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
                if self._stop.is_set() and self._current is not chunk:
                    self._give_back(chunk, False)
                    return
                self._ready.put((chunk, compute))
        except Exception as error:
            self._ready.put((chunk, error))
            self._stop.wait(PAUSE_SECONDS)
        else:
            self._ready.put((chunk, None))
