"""Heartbeats: a thread extends the leases that a process holds, so that they do not expire while it works."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from index.events import Event
from service.logs import RecurringErrors

logger = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 4

T = TypeVar("T")


class Leases(Generic[T]):
    """Leases that a process holds: of chunks, of a sweep, or of the marks of a curve.

    The thread starts with the first lease and ends with `close`.
    """

    def __init__(self, extend: Callable[[T], None], lease_seconds: float) -> None:
        """`extend` sends one heartbeat; if it fails, the next one is still sent on time."""
        self._extend = extend
        self._errors = RecurringErrors(logger)
        self._seconds = lease_seconds / HEARTBEATS_PER_LEASE
        self._held: list[T] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, leased: T) -> None:
        """Extend this lease until it is dropped."""
        with self._lock:
            self._held.append(leased)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
                self._thread.start()

    def drop(self, leased: T) -> None:
        """Stop extending this lease; no effect if it is not held."""
        with self._lock:
            self._held = [held for held in self._held if held is not leased]

    def close(self) -> None:
        """End the thread."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._seconds):
            with self._lock:
                held = list(self._held)
            for leased in held:
                # An error must not end the thread: all leases would expire.
                self._errors.attempt(Event("lease_not_extended"), partial(self._extend, leased))
