"""Folders on their way in: filled beside the accepted ones, so that the last step is a rename; remains are swept."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INCOMING = ".incoming-"
"""How their names begin; no version and no edge may be named so."""


@contextmanager
def incoming_folder(accepted: Path) -> Iterator[Path]:
    """An empty folder inside `accepted`; what is still there at the end was not accepted, and goes."""
    place = accepted / f"{INCOMING}{uuid.uuid4().hex}"
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def remains(accepted: Path) -> Iterator[Path]:
    """The folders that are on their way, or were when somebody was killed."""
    return accepted.glob(f"{INCOMING}*")


def sweep(accepted: Path, seconds: float = 0.0) -> None:
    """Remove what was left by those who were killed; to be called before the first request.

    Where others may be filling theirs at the same time, `seconds` is how long none of them takes.
    """
    for left in remains(accepted):
        if age(left) >= seconds:
            shutil.rmtree(left, ignore_errors=True)


def age(folder: Path) -> float:
    """Seconds since something was put into a folder or taken out; 0 for one that has arrived meanwhile."""
    try:
        return max(time.time() - folder.stat().st_mtime, 0.0)
    except FileNotFoundError:
        return 0.0
