"""THE RETRY RULE: something is tried again, from the start, as long as it ends by one kind of error.

    for attempt in attempts():
        with attempt:
            ...  # read what is asked, encode, search; GalleryChanged ends this attempt and makes another

A query is asked again until the gallery stood still while it was answered; what keeps it from that for good asks
`is_patient`. A provider is asked again after a pause, a few times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token

PAUSE_SECONDS, LONGEST_SECONDS = 0.005, 0.05
"""By so much each pause is longer than the one before, up to a longest: what is waited for is another process."""

Pauses = Callable[[BaseException, int], float | None]
"""The error of an attempt and its number, from 1 -> seconds before the next; None: it was the last."""


class GalleryChanged(Exception):
    """What the queries were read or embedded for is no more.

    The current version or the routes are others now, or a stored item that is a query was written since it was read, or
    that write has not been applied here yet.
    """


def without_end(_error: BaseException, number: int) -> float | None:
    """No last attempt; only the second follows at once."""
    return min((number - 1) * PAUSE_SECONDS, LONGEST_SECONDS)


_MADE: ContextVar[Attempt | None] = ContextVar("_MADE", default=None)
"""The attempt that is being made: who asks `is_patient` is many calls below, and of this one request among many."""


class Attempt:
    """What is tried, until it has not failed.

    Attributes:
        number: of this time, from 1.
        failed: whether it is to be tried again.
        pause: seconds before that.
        hoping_since: when `is_patient` was first asked, at whichever time.
    """

    __slots__ = ("_on", "_outer", "_pauses", "failed", "hoping_since", "number", "pause")

    def __init__(self, on: type[BaseException], pauses: Pauses) -> None:
        self._on, self._pauses = on, pauses
        self.number, self.failed, self.pause = 1, False, 0.0
        self.hoping_since: float | None = None
        self._outer: Token[Attempt | None] | None = None

    @property
    def again(self) -> bool:
        """Whether it is not the first time."""
        return self.number > 1

    def __enter__(self) -> None:
        self.failed = False
        self._outer = _MADE.set(self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if self._outer is not None:
            _MADE.reset(self._outer)
        if isinstance(error, self._on) and (pause := self._pauses(error, self.number)) is not None:
            self.failed, self.pause = True, pause
        return self.failed


def attempts(on: type[BaseException] = GalleryChanged, pauses: Pauses = without_end) -> Iterator[Attempt]:
    """Attempts, until one does not end by an error of the kind `on`, or `pauses` says that it was the last."""
    attempt = Attempt(on, pauses)
    yield attempt
    while attempt.failed:
        if attempt.pause:
            time.sleep(attempt.pause)
        attempt.number += 1
        yield attempt


def is_patient(seconds: float) -> bool:
    """Whether what is being tried may be tried again: until so long after this was asked of it first."""
    now, made = time.monotonic(), _MADE.get()
    if made is None:
        return seconds >= 0
    made.hoping_since = now if made.hoping_since is None else made.hoping_since
    return now - made.hoping_since <= seconds
