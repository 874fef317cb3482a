"""Folders of versions and edges in the image store, one .zip each, for machines without a shared disk."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from index.events import Event
from index.version import CARD
from index.version_folder.archive import pack_version, unpack_version
from service.store.image_store.blobs import StoreUnreachable
from service.store.image_store.object_store import FOLDERS, as_os_errors, is_remote, open_store

logger = logging.getLogger(__name__)


class FolderStore:
    """Stores accepted folders under unique keys.

    Nothing is stored if the image store is on this machine, whose processes share the folders themselves.
    """

    def __init__(self, url: str, check: Callable[[], None]) -> None:
        """`url`: of the image store; `check`: raises StoreUnreachable unless it is the database's own."""
        self._url, self._check = url, check
        self.is_remote = is_remote(url)
        """Whether the image store is accessed over the network; only then, folders are stored."""

    def put(self, folder: Path, key: str) -> None:
        """Store a folder. Raises StoreUnreachable."""
        if not self.is_remote:
            return
        self._check()
        with tempfile.TemporaryDirectory() as scratch:
            packed = Path(scratch) / "packed.zip"
            pack_version(folder, packed)
            self._do("cannot write a folder", lambda store, path: store.put_file(str(packed), path), key)

    def fetch(self, key: str, into: Path, needed: str = CARD) -> bool:
        """Unpack a stored folder into the new folder `into`; False: it is not stored.

        `needed`: a file that must be at its root.

        Raises:
            StoreUnreachable: the store does not answer.
            InvalidVersionFolder: it is damaged.
        """
        packed = into.with_name("packed.zip")
        try:
            self._do("cannot read a folder", lambda store, path: store.get_file(path, str(packed)), key)
        except FileNotFoundError:
            return False
        into.mkdir()
        unpack_version(packed, into, needed)
        return True

    def remove(self, key: str) -> None:
        """Remove a stored folder; one that cannot be removed is logged and left as a harmless orphan."""
        if not self.is_remote:
            return
        try:
            self._check()  # folders of another database have the same keys
            self._do("cannot remove a folder", lambda store, path: store.rm_file(path), key)
        except (StoreUnreachable, FileNotFoundError):
            logger.warning(Event("folder_orphaned", key=key), exc_info=True)

    def _do(self, fails: str, work: Callable[[Any, str], object], key: str) -> None:
        try:
            with as_os_errors():
                store, root = open_store(self._url)
                work(store, f"{root}/{FOLDERS}{key}.zip")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreUnreachable(f"the image store {fails}: {error}") from error
