"""Incoming folders: filled beside the accepted ones and renamed at the end; abandoned ones are removed.

The process that fills a folder holds a lock on it (flock), which the system releases when that process ends in any way.
So several services may share the accepted folders: one that is being filled is never taken for abandoned.
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
"""Prefix of their names; no version and no edge may be named so."""


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
    """Hold the lock on `accepted` alone, waiting for it; on a file system without locks nobody waits."""
    accepted.mkdir(parents=True, exist_ok=True)
    lock = os.open(accepted, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def abandoned_folders(accepted: Path) -> Iterator[Path]:
    """The incoming folders whose process was killed, each locked while it is looked at."""
    for left in paths_in(accepted, f"{INCOMING}*"):
        try:
            lock = os.open(left, os.O_RDONLY)
        except OSError:  # it was renamed, or another process removed it
            continue
        try:
            # Without locks nothing is known of the folders: they stay.
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
    """A new folder, and the file descriptor that holds its lock."""
    while True:
        place = accepted / f"{INCOMING}{uuid.uuid4().hex}"
        place.mkdir(parents=True)
        # Between creation and lock it looks abandoned: one that was removed then is created again.
        with suppress(FileNotFoundError):
            lock = os.open(place, os.O_RDONLY)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if place.exists():
                return place, lock
            os.close(lock)
