"""Wait for a condition that must become true, on machines of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol


class Process(Protocol):
    """A started process."""

    def poll(self) -> int | None: ...


def until(holds: Callable[[], Any], *alive: Process, seconds: float = 90, said: Callable[[], str] = str) -> None:
    """Wait for a condition while the processes that it depends on live; `said` returns their log for the error."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert [code for process in alive if (code := process.poll()) is not None] == [], f"one ended\n{said()}"
        assert time.monotonic() < deadline, f"waited in vain\n{said()}"
        time.sleep(0.01)
