"""What is loaded, least recently used first to go: galleries are loaded when they are asked for, and unloaded for room.

Unloading lets go of an object. Whoever still works with it goes on, and is found here as long as it does: a gallery is
never in memory twice, and nobody works with one that is not followed any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from service.errors import UnknownGallery


class Loadable(Protocol):
    """What the cache keeps: its number, the bytes it takes, and when it was asked for last."""

    id: int
    bytes: int
    used: float


T = TypeVar("T", bound=Loadable)


class Cache(Generic[T]):
    """Loaded galleries by their numbers. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes that all may take together; one that is larger is loaded alone."""
        self.limit = limit
        self._kept: dict[int, T] = {}
        # Unloaded ones too, as long as somebody works with them.
        self._held: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._loading: dict[int, threading.Lock] = {}
        self._entering = threading.Lock()
        self._making_room = threading.Lock()

    def get(self, number: int) -> T | None:
        """One that is loaded; this is a use of it."""
        found = self._kept.get(number)
        if found is not None:
            found.used = time.monotonic()
        return found

    def load(self, number: int, read: Callable[[], T], follow: Callable[[T], bool]) -> T:
        """The same, loaded by `read` if it is not; others that ask for it wait, and nobody else does.

        Whoever writes meanwhile does not wait either: `follow` takes in what was written before anybody gets it.

        Raises:
            UnknownGallery: `follow` found that it was deleted meanwhile.
        """
        with self._loading_of(number):
            if (found := self._kept.get(number)) is None:
                found = self._held[number] = read()
                # Whoever wrote before it was found here did not tell it, and no other process told anyone.
                if not follow(found):
                    self.drop(number)
                    raise UnknownGallery("the gallery was deleted")
            found.used = time.monotonic()
            with self._entering:
                if self._held.get(number) is found:  # not dropped meanwhile
                    self._kept[number] = found
        self.make_room()
        return found

    def in_use(self, number: int) -> T | None:
        """One that is in memory, loaded or not, to be told of a write; None: whoever loads it takes that in."""
        return self._held.get(number)

    def all(self) -> list[T]:
        """Those in memory, by number."""
        there = (reference() for reference in self._held.valuerefs())
        return sorted((found for found in there if found is not None), key=lambda found: found.id)

    def peek(self, number: int) -> T | None:
        """One that is loaded; this is no use of it."""
        return self._kept.get(number)

    def bytes(self) -> int:
        """What they take."""
        return sum(found.bytes for found in list(self._kept.values()))

    def loaded(self) -> int:
        """How many there are."""
        return len(self._kept)

    def drop(self, number: int) -> None:
        """Forget one."""
        with self._entering:
            self._kept.pop(number, None)
            self._held.pop(number, None)

    def make_room(self) -> None:
        """Unload those used longest ago until the others fit; the one used last stays."""
        with self._making_room:
            taken = self.bytes()
            for oldest in sorted(self._kept.values(), key=lambda found: found.used)[:-1]:
                if taken <= self.limit:
                    return
                self._kept.pop(oldest.id, None)
                taken -= oldest.bytes

    def _loading_of(self, number: int) -> threading.Lock:
        return self._loading.setdefault(number, threading.Lock())
