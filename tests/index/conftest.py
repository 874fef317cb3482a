"""Shared by tests of what several threads do at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def background() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Repeats functions in threads until the test ends; what they raise fails the test."""
    stop, threads, failures = threading.Event(), [], []

    def run(function: Callable[[], None]) -> None:
        def loop() -> None:
            try:
                while not stop.is_set():
                    function()
            except BaseException as error:
                failures.append(error)

        threads.append(threading.Thread(target=loop, daemon=True))
        threads[-1].start()

    yield run
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not failures
