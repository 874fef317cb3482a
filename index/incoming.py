"""Incoming folders: temporary folders that are filled next to the accepted ones and then renamed.

The process that fills a folder holds a lock on it (flock), which the system releases when the process ends. So several
services can share the accepted folders, and `sweep` removes only incoming folders whose process is gone.
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
"""Prefix of their names; illegal in names of versions and edges."""


@contextmanager
def incoming_folder(accepted: Path) -> Iterator[Path]:
    """An empty folder inside `accepted`; removed at the end unless it was renamed."""
    with ExitStack() as after:
        place, lock = _make(accepted)
        after.callback(os.close, lock)
        after.callback(shutil.rmtree, place, ignore_errors=True)
        yield place


@contextmanager
def exclusive_access(accepted: Path) -> Iterator[None]:
    """Wait for an exclusive lock on `accepted` and hold it; without effect on a file system without locks."""
    accepted.mkdir(parents=True, exist_ok=True)
    lock = os.open(accepted, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def abandoned_folders(accepted: Path) -> Iterator[Path]:
    """The incoming folders whose process was killed; each is locked while the caller uses it."""
    for left in paths_in(accepted, f"{INCOMING}*"):
        try:
            lock = os.open(left, os.O_RDONLY)
        except OSError:  # it was renamed, or another process removed it
            continue
        try:
            # On a file system without locks the folders are kept, as their state is unknown.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield left
        finally:
            os.close(lock)


def sweep(accepted: Path) -> None:
    """Remove the abandoned folders."""
    for left in abandoned_folders(accepted):
        shutil.rmtree(left, ignore_errors=True)


def _make(accepted: Path) -> tuple[Path, int]:
    """Make a new folder; returns it and the file descriptor of its lock."""
    while True:
        place = accepted / f"{INCOMING}{uuid.uuid4().hex}"
        place.mkdir(parents=True)
        # Before it is locked it looks abandoned: if another process removed it, try again.
        with suppress(FileNotFoundError):
            lock = os.open(place, os.O_RDONLY)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if place.exists():
                return place, lock
            os.close(lock)
