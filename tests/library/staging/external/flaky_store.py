"""A store of contents that fails sometimes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Flaky:
    """Stored contents of which some cannot be read; never two in a row, because the store would seem unavailable."""

    def __init__(self, contents: Any) -> None:
        self.contents, self.reads, self.failures = contents, 0, 0

    def read_all(self, keys: Iterable[str]) -> Iterator[Callable[[], bytes]]:
        for read in self.contents.read_all(keys):
            self.reads += 1
            if self.reads % 6 == 0:
                self.failures += 1
                yield _no_answer
            else:
                yield read


def _no_answer() -> bytes:
    raise TimeoutError("the store did not answer")
