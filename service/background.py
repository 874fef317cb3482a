"""Parts of the service that work on a thread of their own, beside requests."""

from __future__ import annotations

import threading


class Background:
    """A thread between `start` and `stop`, which does what `_run` says."""

    def __init__(self, name: str, stop_seconds: float | None = None) -> None:
        """`name`: of the thread; `stop_seconds`: how long a stop waits for its end, None: until then."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stop_seconds = stop_seconds

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Have it end after the step under way, and wait for that; harmless where it did not start."""
        self._stop.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(self._stop_seconds)

    def _run(self) -> None:
        """Work until `self._stop` is set."""
        raise NotImplementedError

    def _wake(self) -> None:
        """Have it look at `self._stop` where it waits for something else."""
