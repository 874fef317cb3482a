"""Heartbeats: keeps the leases of the chunks in hand from running out, and the claims of a curve's marks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from index.events import Event

logger = logging.getLogger(__name__)

SIGNS_PER_LEASE = 4

C = TypeVar("C")


class Leases(Generic[C]):
    """The chunks of one worker. A thread extends them, which starts with the first one and ends with `close`."""

    def __init__(self, extend: Callable[[C], None], lease_seconds: float) -> None:
        """`extend` sends one heartbeat; when it fails, the next one is given in time nevertheless."""
        self._extend = extend
        self._seconds = lease_seconds / SIGNS_PER_LEASE
        self._held: list[C] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, chunk: C) -> None:
        """Keep the chunk's lease until it is dropped."""
        with self._lock:
            self._held.append(chunk)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
                self._thread.start()

    def drop(self, chunk: C) -> None:
        """Let the chunk's lease run out; one that is not held is no error."""
        with self._lock:
            self._held = [held for held in self._held if held is not chunk]

    def close(self) -> None:
        """End the thread."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._seconds):
            with self._lock:
                held = list(self._held)
            for chunk in held:
                try:
                    self._extend(chunk)
                except Exception:  # a thread that ended here would let every lease run out
                    logger.exception(Event("lease_not_extended"))
