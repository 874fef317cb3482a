"""Images as they were given, in any store fsspec knows. A key is written once, never changed, and named by one row.

Blobs are written before the transaction that refers to them and removed after the one that stops; a crash in between
leaves an orphan, never a row without its image.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec

from index.errors import RegraftError

logger = logging.getLogger(__name__)

SYNCS = 16
"""Files handed to the disk side by side."""


class StoreUnreachable(RegraftError):
    """The image store is out of reach."""

    status = 503
    code = "store_unreachable"


class Blobs:
    """The images of all galleries."""

    def __init__(self, url: str) -> None:
        self._store, self._root = fsspec.core.url_to_fs(url)
        self._local = "file" in self._store.protocol

    def write(self, gallery_id: int, images: Iterable[bytes]) -> list[str]:
        """Store images durably and return their keys, in order. Raises StoreUnreachable."""
        folder = Path(self._path(str(gallery_id)))
        keys: list[str] = []
        try:
            if self._local:
                folder.mkdir(parents=True, exist_ok=True)
            for image in images:
                keys.append(f"{gallery_id}/{uuid.uuid4().hex}")
                self._store.pipe_file(self._path(keys[-1]), image)
            if self._local:
                sync_all([Path(self._path(key)) for key in keys])
                sync_all([folder, folder.parent])
        except BaseException as error:
            self.remove(keys)
            if isinstance(error, OSError):
                raise StoreUnreachable(f"the images cannot be stored: {error}") from error
            raise
        return keys

    def read(self, key: str) -> bytes:
        """The image of a key. Raises FileNotFoundError; another OSError when it is there and cannot be read."""
        try:
            return bytes(self._store.cat_file(self._path(key)))
        except OSError:
            raise
        except Exception as error:  # stores over the network have exception types of their own
            raise OSError(f"{type(error).__name__}: {error}") from error

    def fetch(self, key: str) -> bytes | None:
        """The image of a key, None when it is gone for sure. Raises StoreUnreachable."""
        try:
            return self.read(key)
        except FileNotFoundError:
            self.check()
            return None
        except OSError as error:
            raise StoreUnreachable(f"the image cannot be read: {error}") from error

    def check(self) -> None:
        """Raise StoreUnreachable unless the store answers. Only then does an image that is not found mean anything."""
        try:
            self._store.invalidate_cache(self._root)
            there = self._store.ls(self._root, detail=False)
        except Exception as error:
            raise StoreUnreachable(f"the image store is out of reach: {type(error).__name__}: {error}") from error
        # A disk that is not mounted leaves its empty folder behind.
        if self._local and not there:
            raise StoreUnreachable("the image store is out of reach: its folder is empty")

    def exists(self, key: str) -> bool:
        """Whether there is an image of this key."""
        return bool(self._store.exists(self._path(key)))

    def all(self) -> Iterator[tuple[str, float]]:
        """Every key there is, with its age in seconds; a store that does not tell the age says 0."""
        found = self._store.find(self._root, detail=True) if self._store.exists(self._root) else {}
        now = time.time()
        for path, details in found.items():
            written = details.get("mtime") or details.get("LastModified") or now
            seconds = written if isinstance(written, (int, float)) else written.timestamp()
            yield str(path).removeprefix(self._root).lstrip("/"), max(now - float(seconds), 0.0)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove images; one that cannot be removed is logged and left as an orphan."""
        for key in keys:
            try:
                self._store.rm_file(self._path(key))
            except FileNotFoundError:
                pass
            except OSError:
                logger.warning("orphaned blob %s", key, exc_info=True)

    def remove_gallery(self, gallery_id: int) -> None:
        """Remove every image of a gallery."""
        try:
            self._store.rm(self._path(str(gallery_id)), recursive=True)
        except FileNotFoundError:
            pass
        except OSError:
            logger.warning("orphaned blobs of gallery %s", gallery_id, exc_info=True)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


def sync_all(paths: Sequence[Path]) -> None:
    """Make the content of files, or the names in folders, survive a power cut."""
    # Side by side: the file system then answers many of them by one write of its journal, 8 times as fast.
    with ThreadPoolExecutor(SYNCS) as threads:
        for done in [threads.submit(_sync, path) for path in paths]:
            done.result()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
