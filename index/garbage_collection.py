"""Pausing Python's cyclic garbage collector while many objects are allocated: each run scans all of them again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause collection; it took two thirds of loading a gallery and of its first filter, a fifth of a start.

    Of two overlapping pauses the first to end resumes it.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()
