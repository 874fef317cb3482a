"""`DoomedEngine`: the server of an engine that is killed or frozen at any time, and restored on request."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from typing import Any

GRACE_SECONDS = 15.0
"""Seconds after its return in which clients may still treat it as unavailable, or not know its rows."""


class DoomedEngine:
    """See the module; `server` has `stop`, `start`, `freeze` and `thaw`."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.away: str | None = None
        """How it was ended; None: it is available."""
        self.strikes: Counter[str] = Counter()
        self._back = -GRACE_SECONDS
        self._striking: threading.Timer | None = None

    @property
    def lacking(self) -> bool:
        """Whether answers may lack the items in the engine."""
        return self.away is not None or time.monotonic() - self._back < GRACE_SECONDS

    def strike(self, how: str, seconds: float) -> None:
        """Kill or freeze it in `seconds`, unless that is already planned; `how`: killed or frozen."""
        if self.away is None and self._striking is None:
            self._striking = threading.Timer(seconds, self._strike, (how,))
            self._striking.start()

    def bring_back(self) -> None:
        """Make it available."""
        if self._striking is not None:
            self._striking.join()
            self._striking = None
        if self.away is not None:
            (self._server.start if self.away == "killed" else self._server.thaw)()
            self.away, self._back = None, time.monotonic()

    def _strike(self, how: str) -> None:
        self.away = how
        self.strikes[how] += 1
        if how == "killed":
            self._server.stop(signal.SIGKILL)
        else:
            self._server.freeze()
