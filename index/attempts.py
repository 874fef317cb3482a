"""THE RETRY RULE of a query: it is asked again, from the start, until the gallery stood still while it was answered.

for attempt in attempts():
with attempt:
...  # read what is asked, encode, search; GalleryChanged ends this attempt and makes another
"""

from __future__ import annotations

from collections.abc import Iterator


class GalleryChanged(Exception):
    """What the queries were read or embedded for is no more.

    The current version or the routes are others now, or a stored item that is a query was written since it was read, or
    that write has not been applied here yet.
    """


class Attempt:
    """One attempt; `again`: it is not the first."""

    def __init__(self, again: bool) -> None:
        self.again = again
        self.failed = False

    def __enter__(self) -> None:
        self.failed = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.failed = isinstance(error, GalleryChanged)
        return self.failed


def attempts() -> Iterator[Attempt]:
    """Attempts, until one did not end by GalleryChanged."""
    attempt = Attempt(again=False)
    yield attempt
    while attempt.failed:
        attempt = Attempt(again=True)
        yield attempt
