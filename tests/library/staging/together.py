"""Threads that start at one moment."""

from __future__ import annotations

import threading
from collections.abc import Callable


def together(count: int, work: Callable[[int], None]) -> None:
    """Run it in so many threads, each told its number; raises what one of them raised."""
    barrier, failures = threading.Barrier(count), []

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
