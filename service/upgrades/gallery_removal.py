"""Free a deleted gallery: items and embeddings block by block, then its images, and its row last.

So after a kill another process finds the row and continues.
"""

from __future__ import annotations

import threading

from service.store.database.connections import Database
from service.store.galleries import partitions
from service.store.galleries.deletion import forget_gallery, free_items
from service.store.image_store.blobs import Blobs

BLOCK = 2_000
"""Items freed in one transaction."""
PAUSE_SECONDS = 0.005
"""Pause between two blocks, in which other writers get the lock."""


def free_gallery(database: Database, blobs: Blobs, gallery_id: int, stop: threading.Event) -> None:
    """Free a deleted gallery until nothing is left or `stop` is set; idempotent.

    Raises:
        TimeoutError: partitions are still being read; try again.
    """
    partitions.drop_gallery(database, gallery_id)
    last: int | None = 0
    while last is not None:
        last = _free_block(database, gallery_id, last)
        if last is not None and stop.wait(PAUSE_SECONDS):
            return
    if not _remove_rest(database, blobs, gallery_id):
        raise TimeoutError("the partitions of a deleted gallery are being read")


def free_small_gallery(database: Database, blobs: Blobs, gallery_id: int) -> bool:
    """Free a deleted gallery if it is small, else a part of it. Returns whether nothing is left."""
    partitions.drop_gallery(database, gallery_id)
    last = _free_block(database, gallery_id, 0)
    small = last is None or _free_block(database, gallery_id, last) is None
    return small and _remove_rest(database, blobs, gallery_id)


def _free_block(database: Database, gallery_id: int, after: int) -> int | None:
    with database.write() as connection:
        return free_items(connection, gallery_id, after, BLOCK)


def _remove_rest(database: Database, blobs: Blobs, gallery_id: int) -> bool:
    if not partitions.drop_gallery(database, gallery_id):
        return False  # keep the gallery's row: without it, the partitions would never be found again
    # No row refers to these blobs. An ingest that is writing one finds the gallery deleted and removes the blob again.
    blobs.remove_gallery(gallery_id)
    with database.write() as connection:
        forget_gallery(connection, gallery_id)
    return True
