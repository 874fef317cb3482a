"""Folders of versions and edges for machines that share no disk: a .zip each, beside the images in their store."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from index.archive import pack_version, unpack_version
from index.events import Event
from index.version import CARD
from service.store.blobs import StoreUnreachable
from service.store.object_store import FOLDERS, is_far, one_kind_of_error, open_store

logger = logging.getLogger(__name__)


class FolderStore:
    """What was accepted, by keys that never name anything else.

    Nothing is kept where the images lie on this machine: its processes share the folders themselves.
    """

    def __init__(self, url: str) -> None:
        """`url`: where the images are."""
        self._url = url
        self.far = is_far(url)
        """Whether anything is kept."""

    def keep(self, folder: Path, key: str) -> None:
        """Store a folder, unless it is there. Raises StoreUnreachable."""
        if not self.far:
            return
        with tempfile.TemporaryDirectory() as scratch:
            packed = Path(scratch) / "packed.zip"
            pack_version(folder, packed)
            self._do("does not take a folder", lambda store, path: store.put_file(str(packed), path), key)

    def bring(self, key: str, into: Path, needed: str = CARD) -> bool:
        """Unpack one into a new folder; the file `needed` lies at its root. False: nothing is kept, or not this one.

        Raises:
            StoreUnreachable: nothing can be said of it.
            InvalidVersionFolder: it is damaged.
        """
        packed = into.with_name("packed.zip")
        try:
            self._do("does not give a folder", lambda store, path: store.get_file(path, str(packed)), key)
        except FileNotFoundError:
            return False
        into.mkdir()
        unpack_version(packed, into, needed)
        return True

    def forget(self, key: str) -> None:
        """Remove one; what cannot be removed is logged and left, in nobody's way."""
        if not self.far:
            return
        try:
            self._do("does not remove a folder", lambda store, path: store.rm_file(path), key)
        except (StoreUnreachable, FileNotFoundError):
            logger.warning(Event("folder_orphaned", key=key), exc_info=True)

    def _do(self, fails: str, work: Callable[[Any, str], object], key: str) -> None:
        try:
            with one_kind_of_error():
                store, root = open_store(self._url)
                work(store, f"{root}/{FOLDERS}{key}.zip")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreUnreachable(f"the image store {fails}: {error}") from error
