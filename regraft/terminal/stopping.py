"""Ctrl-C and SIGTERM end a command that can continue later with one line that says so."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from regraft.terminal.answers import err

INTERRUPTED = 130
"""Exit code of a command stopped by Ctrl-C, as in shells."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM inside the block into a line on standard error and the exit code `INTERRUPTED`."""
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        err.print("regraft: stopped; run the same command to continue from the last finished epoch", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """A signal handler: as Ctrl-C does."""
    raise KeyboardInterrupt
