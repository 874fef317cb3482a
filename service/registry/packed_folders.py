"""Folders of versions and edges as .zip files for remote workers: packed once for all workers that fetch concurrently.

Workers that start together fetch the same version, whose archive may have gigabytes.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path


class PackedFolders:
    """The archives that are being fetched. Thread-safe."""

    def __init__(self) -> None:
        self._archives: dict[Hashable, _Archive] = {}
        self._lock = threading.Lock()

    @contextmanager
    def fetching(self, key: Hashable, pack: Callable[[Path], None]) -> Iterator[Path]:
        """Context with the archive of a key, which is removed when its last user leaves.

        `pack` writes it if there is none yet, while other callers wait. Errors of `pack` are raised; the next caller
        retries.
        """
        with self._lock:
            archive = self._archives.setdefault(key, _Archive())
            archive.users += 1
        try:
            yield archive.packed(pack)
        finally:
            with self._lock:
                archive.users -= 1
                if not archive.users:
                    del self._archives[key]
            if not archive.users:
                archive.remove()


class _Archive:
    def __init__(self) -> None:
        self.users = 0
        self._packing = threading.Lock()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def packed(self, pack: Callable[[Path], None]) -> Path:
        with self._packing:
            if self._scratch is None:
                scratch = tempfile.TemporaryDirectory()
                try:
                    pack(Path(scratch.name) / "folder.zip")
                except BaseException:
                    scratch.cleanup()
                    raise
                self._scratch = scratch
            return Path(self._scratch.name) / "folder.zip"

    def remove(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()
