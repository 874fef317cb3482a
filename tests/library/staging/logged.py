"""What tests do with the log of their process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_as_before() -> Iterator[None]:
    """Take back what is changed of where the log goes: else it goes to the stream of a test that has ended."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    logging.captureWarnings(False)  # pytest takes it back after each test, and `logging` believes that it is still so
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
