"""The base class of parts of the service with their own thread."""

from __future__ import annotations

import threading


class Background:
    """A thread that runs `_run` between `start` and `stop`."""

    def __init__(self, name: str, stop_seconds: float | None = None) -> None:
        """`name`: of the thread; `stop_seconds`: how long `stop` waits for the thread to end, None: without limit."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stop_seconds = stop_seconds

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step, and wait for it; no effect if it was not started."""
        self._stop.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(self._stop_seconds)

    def _run(self) -> None:
        """Work until `self._stop` is set."""
        raise NotImplementedError

    def _wake(self) -> None:
        """Wake the thread if it waits for something other than `self._stop`, so that it checks that."""
