"""Threads that start at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable


def together(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in `count` threads, with the number of each; raises an error of any."""
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
