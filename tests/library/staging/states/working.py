"""The real worker, run until it is idle or chunk by chunk, and results as sent by a remote worker."""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from service.backfills.chunks import Chunk
from service.backfills.worker import Worker
from service.settings import Settings


class Idle(Exception):
    """No chunk can be claimed, and no backfill was extended."""


class Impatient(threading.Event):
    """A stop event with short pauses, as waiting changes nothing within one process."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(0.01)


class SteppedWorker(Worker):
    """A worker whose pipeline ends after a number of chunks, if it is idle, or on a failure."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, Impatient())
        self._most, self._claimed, self._failed = 0, 0, False

    def step(self, chunks: int = 1) -> bool:
        """Do up to this many chunks. False: there was none, or one failed."""
        self._most, self._claimed, self._failed = chunks, 0, False
        before = -1
        # The reader may have looked for work before the last chunk was committed; then it must look again.
        while (
            self._claimed < self._most and not self._failed and (self._claimed > before or super()._finish_backfills())
        ):
            before = self._claimed
            self.work()
        return self._claimed > 0 and not self._failed

    def drain(self) -> None:
        """Work until idle or until a failure. A backfill whose chunks are all done is finished last."""
        while self.step(sys.maxsize):
            pass

    def _next(self) -> Chunk | None:
        if self._failed or self._claimed == self._most:
            return None
        try:
            chunk = super()._next()
        except Idle:
            return None
        except Exception:
            self._failed = True
            raise
        self._claimed += 1
        return chunk

    def _finish_backfills(self) -> bool:
        if super()._finish_backfills():
            return True
        raise Idle

    def _return_chunk(self, chunk: Chunk, failed: bool) -> None:
        self._failed |= failed
        super()._return_chunk(chunk, failed)


_UNKNOWN = {name for name in vars(SteppedWorker) if name.startswith("_")} - {*dir(Worker)}
assert not _UNKNOWN, f"Worker has no {_UNKNOWN}: a step that nothing calls would let every test wait for ever"


def work(settings: Settings, chunks: int | None = None) -> None:
    """Let a worker do this many chunks, or all work."""
    with closing(SteppedWorker(settings)) as worker:
        worker.drain() if chunks is None else worker.step(chunks)


def vector(*numbers: float) -> str:
    """An embedding as a remote worker sends it."""
    return base64.b64encode(np.asarray(numbers, "<f4").tobytes()).decode()


def sent_back(items: Sequence[Mapping[str, Any]], **changes: Any) -> dict[str, Any]:
    """The result that a remote worker sends for items of a claim, each with a valid embedding of `v2`."""
    good = vector(1, 0, 0, 0, 0, 0)
    return {"moved": [{"item": one["item"], "seq": one["seq"], "vector": good, **changes} for one in items]}
