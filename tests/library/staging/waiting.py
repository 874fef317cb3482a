"""Waiting for what must come true, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol


class Process(Protocol):
    """One that was started."""

    def poll(self) -> int | None: ...


def until(holds: Callable[[], Any], *alive: Process, seconds: float = 90, said: Callable[[], str] = str) -> None:
    """Wait for a condition, as long as the processes that it depends on live; `said` tells what they told."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert [code for process in alive if (code := process.poll()) is not None] == [], f"one ended\n{said()}"
        assert time.monotonic() < deadline, f"waited in vain\n{said()}"
        time.sleep(0.01)
