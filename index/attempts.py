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
    """One attempt; `again`: it is not the first."""

    def __init__(self, number: int, on: type[BaseException], pauses: Pauses) -> None:
        self.again = number > 1
        self.failed = False
        self.pause = 0.0
        self._number, self._on, self._pauses = number, on, pauses

    def __enter__(self) -> None:
        self.failed = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        pause = self._pauses(error, self._number) if isinstance(error, self._on) else None
        self.failed, self.pause = pause is not None, pause or 0.0
        return self.failed


def attempts(on: type[BaseException] = GalleryChanged, pauses: Pauses = at_once) -> Iterator[Attempt]:
    """Attempts, until one does not end by an error of the kind `on`, or `pauses` says that it was the last."""
    number, attempt = 1, Attempt(1, on, pauses)
    yield attempt
    while attempt.failed:
        if attempt.pause:
            time.sleep(attempt.pause)
        number += 1
        attempt = Attempt(number, on, pauses)
        yield attempt
