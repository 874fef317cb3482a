"""Folders that another machine has accepted, brought here when they are first needed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from index.durable import sync_all
from index.incoming import incoming_folder
from index.version import CARD
from service.store.folder_store import FolderStore


def version_key(card_sha256: str) -> str:
    """What the folder of a version is kept by: its card names the hash of every file."""
    return f"versions/{card_sha256}"


def edge_key(folder: str) -> str:
    """What the folder of an edge is kept by; `folder`: that of its row, drawn for it alone."""
    return f"edges/{folder}"


def bring(folders: FolderStore, final: Path, key: str, needed: str = CARD) -> bool:
    """Put the folder that is kept by a key at `final`, in the place of what is there; False: none is kept.

    Whoever loads it checks what is in it.

    Raises:
        StoreUnreachable, InvalidVersionFolder, OSError: nothing has changed there.
    """
    if not folders.far:
        return False
    final.parent.mkdir(parents=True, exist_ok=True)
    with incoming_folder(final.parent) as place:
        if not folders.bring(key, place / "folder", needed):
            return False
        sync_all([place / "folder", *(place / "folder").rglob("*")])
        with suppress(FileNotFoundError):
            final.rename(place / "before")
        with suppress(OSError):  # another process of this machine was faster
            (place / "folder").rename(final)
        sync_all([final.parent])
    return True
