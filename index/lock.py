"""A lock for many readers or one writer: queries share the gallery, a change to it is seen whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ReadWriteLock:
    """Many readers or one writer; a waiting writer goes before new readers."""

    def __init__(self) -> None:
        self._alone = threading.Lock()
        self._changed = threading.Condition(self._alone)
        self._readers = 0
        self._writers_waiting = 0

    @property
    def contended(self) -> bool:
        """Whether a writer holds it, or waits."""
        return self._writers_waiting > 0

    def read(self) -> ReadWriteLock:
        """Share the lock with other readers. Not reentrant: a waiting writer would block the inner entry."""
        return self

    @contextmanager
    def write(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._changed:
            self._writers_waiting += 1
            # Readers stay out until the count falls, other writers because the condition stays held.
            try:
                self._changed.wait_for(lambda: self._readers == 0)
                yield
            finally:
                self._writers_waiting -= 1
                self._changed.notify_all()

    def __enter__(self) -> None:
        """What `read` gives is the lock itself: a query enters twice, and a generator costs as much as all of this."""
        with self._alone:  # the condition's own, without its methods
            while self._writers_waiting:
                self._changed.wait()
            self._readers += 1

    def __exit__(self, *_: object) -> None:
        with self._alone:
            self._readers -= 1
            if self._writers_waiting:
                self._changed.notify_all()
