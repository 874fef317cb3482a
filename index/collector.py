"""Python's collector of circles, paused while many objects are made: it looks through all of them again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep it from running; it took two thirds of a load, and of a first filter, and a fifth of a start.

    Of two at a time the first ends it.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()
