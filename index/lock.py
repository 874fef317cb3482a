"""A readers-writer lock that prefers writers: queries share a gallery, changes to it are atomic."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ReadWriteLock:
    """Many readers or one writer; a waiting writer precedes new readers."""

    def __init__(self) -> None:
        self._alone = threading.Lock()
        self._changed = threading.Condition(self._alone)
        self._readers = 0
        self._writers_waiting = 0

    @property
    def contended(self) -> bool:
        """Whether a writer holds the lock or waits for it."""
        return self._writers_waiting > 0

    def read(self) -> ReadWriteLock:
        """A context manager that shares the lock with other readers. Not reentrant: a waiting writer would block it."""
        return self

    @contextmanager
    def write(self) -> Iterator[None]:
        """Hold the lock exclusively."""
        with self._changed:
            self._writers_waiting += 1
            # Readers are kept out by the count, other writers by the condition, which stays held.
            try:
                self._changed.wait_for(lambda: self._readers == 0)
                yield
            finally:
                self._writers_waiting -= 1
                self._changed.notify_all()

    def __enter__(self) -> None:
        """Enter as a reader. `read` returns the lock itself, as a generator would double the cost of entering."""
        with self._alone:  # the lock of the condition, entered without its overhead
            while self._writers_waiting:
                self._changed.wait()
            self._readers += 1

    def __exit__(self, *_: object) -> None:
        with self._alone:
            self._readers -= 1
            if self._writers_waiting:
                self._changed.notify_all()
