"""Folders on their way in: filled beside the accepted ones, so that the last step is a rename; remains are swept.

Whoever fills a folder holds a lock on it (flock), which the system takes back when the process ends, however it ends.
So several services may share the accepted folders: what somebody is filling is never taken for remains.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from index.paths import paths_in

INCOMING = ".incoming-"
"""How their names begin; no version and no edge may be named so."""


@contextmanager
def incoming_folder(accepted: Path) -> Iterator[Path]:
    """An empty folder inside `accepted`; what is still there at the end was not accepted, and goes."""
    with ExitStack() as after:
        place, lock = _make(accepted)
        after.callback(os.close, lock)
        after.callback(shutil.rmtree, place, ignore_errors=True)
        yield place


@contextmanager
def alone_in(accepted: Path) -> Iterator[None]:
    """Wait until nobody else is alone in `accepted`, and be so; where the file system has no locks, everyone is."""
    accepted.mkdir(parents=True, exist_ok=True)
    lock = os.open(accepted, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def remains(accepted: Path) -> Iterator[Path]:
    """The folders that were on their way when whoever filled them was killed; nobody else sweeps one meanwhile."""
    for left in paths_in(accepted, f"{INCOMING}*"):
        try:
            lock = os.open(left, os.O_RDONLY)
        except OSError:  # it has arrived, or somebody else swept it
            continue
        try:
            # A file system without locks tells nothing of its folders: they stay.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield left
        finally:
            os.close(lock)


def sweep(accepted: Path) -> None:
    """Remove what was left by those who were killed."""
    for left in remains(accepted):
        shutil.rmtree(left, ignore_errors=True)


def _make(accepted: Path) -> tuple[Path, int]:
    """A new folder, and the file descriptor that holds its lock."""
    while True:
        place = accepted / f"{INCOMING}{uuid.uuid4().hex}"
        place.mkdir(parents=True)
        # Between being made and being locked it looks abandoned: one that was swept then is made anew.
        with suppress(FileNotFoundError):
            lock = os.open(place, os.O_RDONLY)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if place.exists():
                return place, lock
            os.close(lock)
