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


def load_items(connection: Connection, registry: Registry, live: LoadedGallery, progress: LoadProgress) -> None:
    """Load all items of a gallery in a read transaction.

    If a snapshot was used, the gallery is at its feed number afterwards, and later changes have yet to be read.
    """
    live.declare()
    if has_segments(live.folder) or live.gallery.config.kind.is_remote:
        _load_sealed(connection, registry, live, progress)
    else:
        _load_vectors(connection, registry, live, progress)


def _load_vectors(connection: Connection, registry: Registry, live: LoadedGallery, progress: LoadProgress) -> None:
    """Read all vectors with their items in one pass, as none is in a sealed segment or an engine."""
    progress.total = live_items(connection, live.id)
    for block in prefetched(gather_changes(registry, [rows]) for rows in changes(connection, live.id, 0)):
        live.apply(block)
        progress.add(len(block.items) + len(block.missing))


def _load_sealed(connection: Connection, registry: Registry, live: LoadedGallery, progress: LoadProgress) -> None:
    """Load the items whose vectors sealed segments or engines have, by a snapshot if there is one; then the others."""
    snapshot = newest(connection, live, {version.name for version in registry.all()})
    blocks_of_contents: Iterator[Contents]
    if snapshot is None:
        progress.total = live_items(connection, live.id)
        blocks_of_contents = prefetched(
            gallery_contents(connection, live.id, lambda number: registry.by_id(number).name)
        )
    else:
        progress.total = len(snapshot[0].keys_N)
        blocks_of_contents = iter([snapshot[0]])
    remaining: list[int] = []
    for stored in blocks_of_contents:
        not_loaded = live.gallery.load(stored).tolist()
        remaining += not_loaded
        progress.add(len(stored.keys_N) - len(not_loaded))
    for rows in feed_of(connection, live.id, remaining):
        live.apply(gathered := gather_changes(registry, [rows]))
        progress.add(len(gathered.items) + len(gathered.missing))
    if snapshot is not None:
        live.apply(FeedChanges(), snapshot[1])
        live.snapshot_seq, live.unsealed_at_snapshot = snapshot[1], len(remaining)
