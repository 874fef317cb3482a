"""Locks of files and folders (flock), which the system releases when the process ends, however it ends.

On a file system without locks, and on Windows, every process gets every lock. But none gets that of a folder
(`locked_folder`), as it tells whether what lies there may be removed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def try_lock(file: int) -> bool:
    """Lock an open file or folder, by its file descriptor; False: another process holds the lock."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def open_locked(path: Path) -> int | None:
    """Open a file for reading and writing, made if it is missing, and lock it.

    Returns:
        Its file descriptor; None: another process holds the lock.

    Raises:
        OSError: it cannot be opened.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        if not try_lock(file):
            os.close(file)
            return None
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # whoever held the lock before has removed the file


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, made if it is missing, inside the block, which may rename or remove it.

    Waits for other processes, and for other threads of this one.

    Raises:
        OSError: it cannot be opened.
    """
    if sys.platform == "win32":  # an open file could not be renamed
        yield
        return
    file = _open_when_unlocked(path)
    try:
        yield
    finally:
        os.close(file)


@contextmanager
def locked_folder(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of a folder inside the block, which may remove the folder.

    Args:
        folder: the folder.
        wait: until no other process holds the lock.

    Yields:
        Whether it is held. False: another process holds it, the folder is gone, or there are no locks here.
    """
    if sys.platform == "win32":  # no folder can be opened there
        yield False
        return
    import fcntl

    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        held = False
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        yield held
    finally:
        os.close(file)


def _open_when_unlocked(path: Path) -> int:
    """Open a file for reading and writing, made if it is missing, and lock it; its file descriptor."""
    import fcntl

    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # whoever held the lock before has renamed or removed the file
