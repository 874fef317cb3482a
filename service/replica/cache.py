"""A least-recently-used cache of galleries: loaded on demand, unloaded to free memory.

Unloading only drops a reference. A gallery that is still in use stays known by a weak reference, so that no gallery is
in memory twice and each one in use follows the feed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from service.errors import UnknownGallery


class Loadable(Protocol):
    """An entry of the cache: its number, its size in bytes, and its last use (monotonic seconds)."""

    id: int
    bytes: int
    used: float


T = TypeVar("T", bound=Loadable)


class Cache(Generic[T]):
    """Loaded galleries by their numbers. Thread-safe."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of all loaded entries; a larger entry is loaded alone."""
        self.limit = limit
        self._loaded: dict[int, T] = {}
        # Including unloaded entries that are still in use.
        self._in_memory: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._loading: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()
        self._making_room = threading.Lock()

    def get(self, number: int) -> T | None:
        """A loaded entry; counts as a use."""
        entry = self._loaded.get(number)
        if entry is not None:
            entry.used = time.monotonic()
        return entry

    def load(self, number: int, read: Callable[[], T], follow: Callable[[T], bool]) -> T:
        """An entry, loaded by `read` if necessary; only callers that need the same entry wait.

        Writers do not wait: before the entry is used, `follow` applies what was written during the load.

        Raises:
            UnknownGallery: `follow` found that it was deleted meanwhile.
        """
        with self._loading_of(number):
            if (entry := self._loaded.get(number)) is None:
                entry = self._in_memory[number] = read()
                # Writes from before the entry was registered here did not reach it.
                if not follow(entry):
                    self.drop(number)
                    raise UnknownGallery("the gallery was deleted")
            entry.used = time.monotonic()
            with self._lock:
                if self._in_memory.get(number) is entry:  # not dropped meanwhile
                    self._loaded[number] = entry
        self.make_room()
        return entry

    def in_use(self, number: int) -> T | None:
        """An entry in memory, loaded or not, to apply a write to; None: a load will read that write."""
        return self._in_memory.get(number)

    def all(self) -> list[T]:
        """The entries in memory, by number."""
        entries = (reference() for reference in self._in_memory.valuerefs())
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.id)

    def peek(self, number: int) -> T | None:
        """A loaded entry; does not count as a use."""
        return self._loaded.get(number)

    def bytes(self) -> int:
        """The bytes of all loaded entries."""
        return sum(entry.bytes for entry in list(self._loaded.values()))

    def loaded(self) -> int:
        """How many entries are loaded."""
        return len(self._loaded)

    def drop(self, number: int) -> None:
        """Forget an entry."""
        with self._lock:
            self._loaded.pop(number, None)
            self._in_memory.pop(number, None)

    def make_room(self) -> None:
        """Unload the least recently used entries until the others fit; the most recently used one stays."""
        with self._making_room:
            used_bytes = self.bytes()
            for oldest in sorted(self._loaded.values(), key=lambda entry: entry.used)[:-1]:
                if used_bytes <= self.limit:
                    return
                self._loaded.pop(oldest.id, None)
                used_bytes -= oldest.bytes

    def _loading_of(self, number: int) -> threading.Lock:
        return self._loading.setdefault(number, threading.Lock())
