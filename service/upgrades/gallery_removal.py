"""Freeing what a deleted gallery held: items and embeddings block by block, then its images, and its row at last.

The row is what a process that starts finds: killed anywhere in between, the next one goes on.
"""

from __future__ import annotations

import threading

from service.store import partitions
from service.store.blobs import Blobs
from service.store.database import Database
from service.store.deletion import forget_gallery, free_items

BLOCK = 2_000
"""Items freed in one transaction."""
PAUSE_SECONDS = 0.005
"""Between two blocks, so that those who wait to write get their turn."""


def free_gallery(database: Database, blobs: Blobs, gallery_id: int, stop: threading.Event) -> None:
    """Free a deleted gallery until nothing is left, or `stop` is set; harmless when it is done already.

    Raises:
        TimeoutError: others still read there; to be tried again.
    """
    partitions.drop_gallery(database, gallery_id)
    last: int | None = 0
    while last is not None:
        last = _free_block(database, gallery_id, last)
        if last is not None and stop.wait(PAUSE_SECONDS):
            return
    if not _end(database, blobs, gallery_id):
        raise TimeoutError("the partitions of a deleted gallery are being read")


def free_small_gallery(database: Database, blobs: Blobs, gallery_id: int) -> bool:
    """Free a deleted gallery at once if it is small, else a part; whether nothing is left."""
    partitions.drop_gallery(database, gallery_id)
    last = _free_block(database, gallery_id, 0)
    small = last is None or _free_block(database, gallery_id, last) is None
    return small and _end(database, blobs, gallery_id)


def _free_block(database: Database, gallery_id: int, after: int) -> int | None:
    with database.write() as connection:
        return free_items(connection, gallery_id, after, BLOCK)


def _end(database: Database, blobs: Blobs, gallery_id: int) -> bool:
    if not partitions.drop_gallery(database, gallery_id):
        return False  # once the gallery's row is gone nobody would know of them
    # No row names them, so nobody misses them; whoever is storing one now finds the gallery gone and removes it again.
    blobs.remove_gallery(gallery_id)
    with database.write() as connection:
        forget_gallery(connection, gallery_id)
    return True
