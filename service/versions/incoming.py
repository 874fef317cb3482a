"""Folders on their way in: filled beside the accepted ones, so that the last step is a rename; remains are swept."""

from __future__ import annotations

import shutil
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


def sweep(accepted: Path) -> None:
    """Remove what was left by those who were killed; to be called before the first request."""
    for left in remains(accepted):
        shutil.rmtree(left, ignore_errors=True)
