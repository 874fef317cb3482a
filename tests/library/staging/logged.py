"""Restore the logging of the test process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_as_before() -> Iterator[None]:
    """Restore the handlers of the log, which else would write to the stream of a test that has ended."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    logging.captureWarnings(False)  # pytest undoes it after each test, but `logging` does not notice
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
