"""A real worker that ends itself, without a chance to clean up, at one point of its n-th chunk: `POINT N`."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from service.backfills import chunks, sweeps, worker
from service.settings import Settings

POINTS: dict[str, tuple[Any, str, bool, signal.Signals]] = {
    # point: (where, which function, at its end instead of its beginning, how)
    "claimed": (worker.Worker, "_load", False, signal.SIGKILL),
    "computed": (worker.Worker, "_persist", False, signal.SIGKILL),
    "written": (chunks, "commit", True, signal.SIGKILL),
    "committed": (worker.Worker, "_persist", True, signal.SIGKILL),
    "ending": (sweeps, "_close", True, signal.SIGKILL),
    "planning": (sweeps._Sweep, "_write", True, signal.SIGKILL),
    "frozen": (worker.Worker, "_persist", False, signal.SIGSTOP),
}


def doom(call: Callable[..., Any], at_end: bool, how: signal.Signals, number: int) -> Callable[..., Any]:
    calls = itertools.count(1)

    def doomed(*args: Any) -> Any:
        due = next(calls) == number
        if due and how is signal.SIGSTOP:
            # Between transactions: a process that freezes inside one locks SQLite for everyone.
            with args[0]._database._write_lock:
                os.kill(os.getpid(), how)
                time.sleep(0.5)  # the signal may take effect a moment later, in another thread first
        elif due and not at_end:
            os.kill(os.getpid(), how)
        result = call(*args)
        if due and at_end:
            os.kill(os.getpid(), how)
        return result

    return doomed


if __name__ == "__main__":
    where, name, at_end, how = POINTS[sys.argv[1]]
    setattr(where, name, doom(getattr(where, name), at_end, how, int(sys.argv[2])))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    worker.run(Settings(), stop)
