"""`CircuitBreaker`: after a call to an engine failed, further calls fail at once for a moment.

A frozen server costs every call its whole time limit. So only the first call waits for it, the next ones fail at once,
and from time to time one is let through to test the server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from index.engines.remote import EngineUnavailable

REST_SECONDS = 1.0
"""How long after a failure no call is made."""


class CircuitBreaker:
    """Wraps every call to one server. Thread-safe."""

    def __init__(self, rest_seconds: float = REST_SECONDS) -> None:
        self._rest_seconds = rest_seconds
        self._lock = threading.Lock()
        # The error of the last call, None if it succeeded; and when the next call may try.
        self._failure: EngineUnavailable | None = None
        self._retry_at = 0.0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wrap one call. Raises EngineUnavailable at once while the server rests."""
        with self._lock:
            if self._failure is not None:
                if time.monotonic() < self._retry_at:
                    raise EngineUnavailable(self._failure.message)
                self._retry_at = time.monotonic() + self._rest_seconds  # one tries, the others go on failing
        try:
            yield
        except EngineUnavailable as error:
            with self._lock:
                self._failure, self._retry_at = error, time.monotonic() + self._rest_seconds
            raise
        with self._lock:
            self._failure = None
