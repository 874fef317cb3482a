"""A store of contents that fails now and then."""

from __future__ import annotations

from typing import Any


class Flaky:
    """Stored contents of which now and then one cannot be read; never two in a row: the store would seem away."""

    def __init__(self, contents: Any) -> None:
        self.contents, self.reads, self.failures = contents, 0, 0

    def read(self, key: str) -> bytes:
        self.reads += 1
        if self.reads % 6 == 0:
            self.failures += 1
            raise TimeoutError("the store did not answer")
        return bytes(self.contents.read(key))

    def check(self) -> None:
        self.contents.check()
