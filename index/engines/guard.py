"""`Breaker`: after an engine has failed, nobody waits for it for a moment.

A frozen server costs every call its whole time limit. So the first failure is waited for, the next calls fail at once,
and now and then one is let through to see.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from index.engines.remote import EngineUnavailable

REST_SECONDS = 1.0
"""So long after a failure no call is made."""


class Breaker:
    """What stands before every call to one server. Thread-safe."""

    def __init__(self, rest_seconds: float = REST_SECONDS) -> None:
        self._rest_seconds = rest_seconds
        self._lock = threading.Lock()
        # None: the last call went well. Else what went wrong, and from when on one may try again.
        self._failure: EngineUnavailable | None = None
        self._again = 0.0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one call. Raises EngineUnavailable at once while the server rests."""
        with self._lock:
            if self._failure is not None:
                if time.monotonic() < self._again:
                    raise EngineUnavailable(self._failure.message)
                self._again = time.monotonic() + self._rest_seconds  # one tries, the others go on failing
        try:
            yield
        except EngineUnavailable as error:
            with self._lock:
                self._failure, self._again = error, time.monotonic() + self._rest_seconds
            raise
        with self._lock:
            self._failure = None
