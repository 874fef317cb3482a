"""`CircuitBreaker`: after a failed call to an engine, further calls fail at once for a short time.

Every call to a hanging server takes its whole time limit. So only the first call waits for it, the next calls fail at
once, and one call per `REST_SECONDS` tests the server again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from index.engines.remote.base import EngineUnavailable

REST_SECONDS = 1.0
"""Seconds after a failure in which calls fail at once."""


class CircuitBreaker:
    """Wraps every call to one server. Thread-safe."""

    def __init__(self, rest_seconds: float = REST_SECONDS) -> None:
        self._rest_seconds = rest_seconds
        self._lock = threading.Lock()
        # The error of the last call, None if it succeeded; and the time from which the next call is made.
        self._failure: EngineUnavailable | None = None
        self._retry_at = 0.0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wrap one call. Raises EngineUnavailable at once in the time after a failure."""
        with self._lock:
            if self._failure is not None:
                if time.monotonic() < self._retry_at:
                    raise EngineUnavailable(self._failure.message)
                self._retry_at = time.monotonic() + self._rest_seconds  # this call tests the server, others fail
        try:
            yield
        except EngineUnavailable as error:
            with self._lock:
                self._failure, self._retry_at = error, time.monotonic() + self._rest_seconds
            raise
        with self._lock:
            self._failure = None
