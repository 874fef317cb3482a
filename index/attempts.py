"""THE RETRY RULE: something is tried again, from the start, as long as it ends by one kind of error.

    for attempt in attempts():
        with attempt:
            ...  # read what is asked, encode, search; GalleryChanged ends this attempt and makes another

A query is asked again until the gallery stood still while it was answered. A provider is asked again after a pause, a
few times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

Pauses = Callable[[BaseException, int], float | None]
"""The error of an attempt and its number, from 1 -> seconds before the next; None: it was the last."""


class GalleryChanged(Exception):
    """What the queries were read or embedded for is no more.

    The current version or the routes are others now, or a stored item that is a query was written since it was read, or
    that write has not been applied here yet.
    """


def at_once(_error: BaseException, _number: int) -> float | None:
    """No pause, and no last attempt."""
    return 0.0


class Attempt:
    """What is tried, until it has not failed.

    Attributes:
        number: of this time, from 1.
        failed: whether it is to be tried again.
        pause: seconds before that.
    """

    __slots__ = ("_on", "_pauses", "failed", "number", "pause")

    def __init__(self, on: type[BaseException], pauses: Pauses) -> None:
        self._on, self._pauses = on, pauses
        self.number, self.failed, self.pause = 1, False, 0.0

    @property
    def again(self) -> bool:
        """Whether it is not the first time."""
        return self.number > 1

    def __enter__(self) -> None:
        self.failed = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, self._on) and (pause := self._pauses(error, self.number)) is not None:
            self.failed, self.pause = True, pause
        return self.failed


def attempts(on: type[BaseException] = GalleryChanged, pauses: Pauses = at_once) -> Iterator[Attempt]:
    """Attempts, until one does not end by an error of the kind `on`, or `pauses` says that it was the last."""
    attempt = Attempt(on, pauses)
    yield attempt
    while attempt.failed:
        if attempt.pause:
            time.sleep(attempt.pause)
        attempt.number += 1
        yield attempt
