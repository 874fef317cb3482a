"""Locks of files and folders (flock), which the system releases when the process ends, however it ends.

On a file system without locks, and on Windows, every process gets every lock.
"""

from __future__ import annotations

import os
import sys
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
