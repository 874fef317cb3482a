"""Folders of versions and edges as .zip files for remote workers: each is packed once for all who fetch it at a time.

Workers that are started together all want the same version, whose archive may be of gigabytes.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path


class PackedFolders:
    """The archives that somebody fetches now. Threads may share it."""

    def __init__(self) -> None:
        self._archives: dict[Hashable, _Archive] = {}
        self._counting = threading.Lock()

    @contextmanager
    def fetching(self, key: Hashable, pack: Callable[[Path], None]) -> Iterator[Path]:
        """The archive of this key, which is there until the last who fetches it is done.

        `pack` makes it where nobody has yet; others wait meanwhile. Raises what it raises, and whoever comes next tries
        again.
        """
        with self._counting:
            archive = self._archives.setdefault(key, _Archive())
            archive.users += 1
        try:
            yield archive.packed(pack)
        finally:
            with self._counting:
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
