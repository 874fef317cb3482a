"""Folders of versions and edges that another machine accepted, fetched on first use here."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from index.durable import sync_all
from index.incoming import incoming_folder
from index.version import CARD
from service.store.image_store.folders import FolderStore


def version_key(card_sha256: str) -> str:
    """The key of a version's folder in the store: its card names the hash of every file."""
    return f"versions/{card_sha256}"


def edge_key(folder: str) -> str:
    """The key of an edge's folder in the store; `folder`: the unique folder in the edge's row."""
    return f"edges/{folder}"


def fetch_folder(folders: FolderStore, final: Path, key: str, needed: str = CARD) -> bool:
    """Replace the folder `final` by the stored one; False: none is stored. The caller checks its content by loading it.

    Raises:
        StoreUnreachable, InvalidVersionFolder, OSError: `final` is unchanged.
    """
    if not folders.is_remote:
        return False
    final.parent.mkdir(parents=True, exist_ok=True)
    with incoming_folder(final.parent) as workspace:
        if not folders.fetch(key, workspace / "folder", needed):
            return False
        sync_all([workspace / "folder", *(workspace / "folder").rglob("*")])
        with suppress(FileNotFoundError):
            final.rename(workspace / "before")
        with suppress(OSError):  # another process of this machine was faster
            (workspace / "folder").rename(final)
        sync_all([final.parent])
    return True
