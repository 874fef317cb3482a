"""Folders of versions and edges as .zip files for remote workers: packed once for all workers that fetch one together.

Workers that start together fetch the same version, whose archive may have gigabytes.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path


class PackedFolders:
    """The archives that are being fetched. Safe to share between threads."""

    def __init__(self) -> None:
        self._archives: dict[Hashable, _Archive] = {}
        self._lock = threading.Lock()

    @contextmanager
    def fetching(self, key: Hashable, pack: Callable[[Path], None]) -> Iterator[Path]:
        """The archive of this key; it is removed when the last of those who fetch it is done.

        `pack` writes it if there is none yet; others wait meanwhile. Raises what `pack` raises; the next caller tries
        again.
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
