"""Load a gallery's items (`load_items`), in blocks to bound the memory: the gallery is not in use yet."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection

from index.contents import Contents
from service.registry.registry import Registry
from service.replica.feed import FeedChanges, gather_changes, prefetched
from service.replica.load_progress import LoadProgress
from service.replica.loaded import LoadedGallery
from service.replica.snapshots import has_segments, newest
from service.store.galleries.change_feed import changes, feed_of
from service.store.galleries.contents import gallery_contents
from service.store.galleries.items import live_items


def load_items(connection: Connection, registry: Registry, loaded: LoadedGallery, progress: LoadProgress) -> None:
    """Load all items of a gallery in a read transaction.

    If a snapshot was used, the gallery is at its feed number afterwards, and later changes have yet to be read.
    """
    loaded.declare()
    if has_segments(loaded.folder) or loaded.gallery.config.kind.is_remote:
        _load_sealed(connection, registry, loaded, progress)
    else:
        _load_vectors(connection, registry, loaded, progress)


def _load_vectors(connection: Connection, registry: Registry, loaded: LoadedGallery, progress: LoadProgress) -> None:
    """Read all vectors with their items in one pass, as none is in a sealed segment or an engine."""
    progress.total = live_items(connection, loaded.id)
    for block in prefetched(gather_changes(registry, [rows]) for rows in changes(connection, loaded.id, 0)):
        loaded.apply(block)
        progress.add(len(block.items) + len(block.missing))


def _load_sealed(connection: Connection, registry: Registry, loaded: LoadedGallery, progress: LoadProgress) -> None:
    """Load the items whose vectors sealed segments or engines have, by a snapshot if there is one; then the others."""
    snapshot = newest(connection, loaded, {version.name for version in registry.all()})
    blocks_of_contents: Iterator[Contents]
    if snapshot is None:
        progress.total = live_items(connection, loaded.id)
        blocks_of_contents = prefetched(
            gallery_contents(connection, loaded.id, lambda number: registry.by_id(number).name)
        )
    else:
        progress.total = len(snapshot[0].keys_N)
        blocks_of_contents = iter([snapshot[0]])
    remaining: list[int] = []
    for stored in blocks_of_contents:
        not_loaded = loaded.gallery.load(stored).tolist()
        remaining += not_loaded
        progress.add(len(stored.keys_N) - len(not_loaded))
    for rows in feed_of(connection, loaded.id, remaining):
        loaded.apply(gathered := gather_changes(registry, [rows]))
        progress.add(len(gathered.items) + len(gathered.missing))
    if snapshot is not None:
        loaded.apply(FeedChanges(), snapshot[1])
        loaded.snapshot_seq, loaded.unsealed_at_snapshot = snapshot[1], len(remaining)
