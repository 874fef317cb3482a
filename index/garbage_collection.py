"""Pause Python's cyclic garbage collector while many objects are allocated: each run would scan them all."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause collection, which took two thirds of loading a gallery and of its first filter, and a fifth of a start.

    Of two overlapping pauses the first to end resumes collection.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()
