"""The retry rule (`attempts`): a block is repeated from its start as long as it raises one type of error.

    for attempt in attempts():
        with attempt:
            ...  # read the query, encode, search; GalleryChanged ends this attempt and starts another

A query is repeated until the gallery does not change while it is answered; code that could raise for ever checks
`may_retry_within` first. A call to a provider is repeated a few times, each after a pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token

PAUSE_STEP_SECONDS, MAX_PAUSE_SECONDS = 0.005, 0.05
"""Increase of each pause over the one before, and the longest pause: a retry waits for another process."""

NextPause = Callable[[BaseException, int], float | None]
"""(error, number of the failed attempt, from 1) -> seconds before the next attempt; None: no further attempt."""


class GalleryChanged(Exception):
    """The gallery changed since the queries were read or embedded.

    Causes: other routes or another current version; a stored item that is a query was written since it was read; or
    the write that was read is not yet applied in this process.
    """


def retry_forever(_error: BaseException, number: int) -> float | None:
    """Retry without a limit; only the second attempt starts without a pause."""
    return min((number - 1) * PAUSE_STEP_SECONDS, MAX_PAUSE_SECONDS)


_CURRENT: ContextVar[Attempt | None] = ContextVar("_CURRENT", default=None)
"""The running attempt of this request, for `may_retry_within`, which is called far below it."""


class Attempt:
    """A block that is repeated.

    Attributes:
        number: number of the current run, from 1.
        failed: whether to run again.
        pause: seconds before the next run.
        retrying_since: when `may_retry_within` was first called, in any run.
    """

    __slots__ = ("_on", "_outer", "_pauses", "failed", "number", "pause", "retrying_since")

    def __init__(self, on: type[BaseException], pauses: NextPause) -> None:
        self._on, self._pauses = on, pauses
        self.number, self.failed, self.pause = 1, False, 0.0
        self.retrying_since: float | None = None
        self._outer: Token[Attempt | None] | None = None

    @property
    def is_retry(self) -> bool:
        """Whether this is not the first run."""
        return self.number > 1

    def __enter__(self) -> None:
        self.failed = False
        self._outer = _CURRENT.set(self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if self._outer is not None:
            _CURRENT.reset(self._outer)
        if isinstance(error, self._on) and (pause := self._pauses(error, self.number)) is not None:
            self.failed, self.pause = True, pause
        return self.failed


def attempts(on: type[BaseException] = GalleryChanged, pauses: NextPause = retry_forever) -> Iterator[Attempt]:
    """Yield attempts until one does not raise `on`, or `pauses` returns None."""
    attempt = Attempt(on, pauses)
    yield attempt
    while attempt.failed:
        if attempt.pause:
            time.sleep(attempt.pause)
        attempt.number += 1
        yield attempt


def may_retry_within(seconds: float) -> bool:
    """Whether the running attempt may be retried: for this many seconds after the first call, in any of its runs."""
    now, made = time.monotonic(), _CURRENT.get()
    if made is None:
        return seconds >= 0
    made.retrying_since = now if made.retrying_since is None else made.retrying_since
    return now - made.retrying_since <= seconds
