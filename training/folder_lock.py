"""A file lock that lets one training at a time write a version folder; others are refused, or wait.

A training into OUT holds a lock on OUT.lock (flock), which the system releases when the process ends, however it ends.
The file holds the checksum of the card that was there before, which tells whether a killed training had replaced it.
Of the processes that `torchrun` started, rank zero holds it for all.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from index.errors import InvalidArgument, Unwritable
from index.file_lock import open_locked
from index.version import CARD
from index.version_folder.folder import card_sha256
from index.version_folder.new_folder import clear_leftovers
from training import processes

_held_locks: dict[Path, int] = {}
"""Lock file -> file descriptor, of the locks that this process holds; it would wait for itself at one of these."""


class FolderInUse(InvalidArgument):
    """Another training is writing to this folder."""

    def __init__(self, out: Path) -> None:
        super().__init__(
            f"another process is training into {out}; wait for it, or choose another folder with --out", pointer="/out"
        )


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Hold the lock of a version folder inside the block.

    Raises:
        FolderInUse: another training holds it.
        Unwritable: nothing can be written beside the folder.
    """
    if not processes.is_rank_zero():
        yield
        return
    missing = [folder for folder in out.parents if not folder.exists()]
    try:
        file = _acquire_lock(out)
    except OSError as error:
        raise Unwritable(f"{out} cannot be written: {error.strerror or error}") from error
    _held_locks[lock_file(out).resolve()] = file
    try:
        clear_leftovers(out)
        yield
    finally:
        _held_locks.pop(lock_file(out).resolve(), None)
        lock_file(out).unlink(missing_ok=True)
        os.close(file)
        with suppress(OSError):  # a folder with something in it stays
            for folder in missing:
                folder.rmdir()


def wait_until_unlocked(out: Path, say: Callable[[str], None], finish: Callable[[Path], None]) -> None:
    """Return once no training writes a folder, and nothing is left of one that was killed but what it can resume from.

    Args:
        out: the folder.
        say: told of it where that takes time.
        finish: called with `out`, locked, if its last training was killed after its version had taken its place.

    Raises:
        FolderInUse: this process itself trains into it.
    """
    if lock_file(out).resolve() in _held_locks:
        raise FolderInUse(out)
    with suppress(FileNotFoundError), lock_file(out).open("rb") as file, suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that trains {out}")
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # a training that was not killed has removed it
            clear_leftovers(out)
            if card_sha(out) not in {"", file.read().decode()}:
                finish(out)
            lock_file(out).unlink()


def lock_file(out: Path) -> Path:
    """The file that is locked; removed when the training ends."""
    return out.with_name(f"{out.name}.lock")


def card_sha(folder: Path) -> str:
    """The sha256 of a version's card, which holds its files' checksums; "" where there is no version."""
    return card_sha256(folder) if (folder / CARD).is_file() else ""


def _close_inherited_locks() -> None:
    """Close the lock files that a forked process inherited from its parent."""
    for file in _held_locks.values():
        os.close(file)
    _held_locks.clear()


# Data loader workers live on for seconds after a training that was killed.
os.register_at_fork(after_in_child=_close_inherited_locks)


def _acquire_lock(out: Path) -> int:
    """Take the lock; the file descriptor that holds it."""
    while True:
        # The training before removes empty folders at its end: then try again.
        with suppress(FileNotFoundError):
            out.parent.mkdir(parents=True, exist_ok=True)
            if (file := open_locked(lock_file(out))) is None:
                raise FolderInUse(out)
            try:
                os.truncate(file, 0)
                os.pwrite(file, card_sha(out).encode(), 0)
            except OSError:
                os.close(file)
                raise
            return file
