"""A cache of how many items each version serves in galleries that are not loaded, as counting reads every item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection

from service.store.galleries.held_versions import live_items_by_version
from service.store.rows import GalleryRow

MAX_GALLERIES = 10_000
"""Most galleries whose counts are cached."""


class ItemCountCache:
    """Counts a gallery again only if its items were written since, or the order of versions has changed."""

    def __init__(self) -> None:
        self._counted: dict[int, tuple[tuple[int, Sequence[int]], Mapping[int, int]]] = {}

    def of(self, connection: Connection, gallery: GalleryRow, order: Sequence[int]) -> Mapping[int, int]:
        """As `live_items_by_version`; `connection`: the snapshot in which the gallery's row was read."""
        state = (gallery.next_seq, order)
        known = self._counted.get(gallery.id)
        if known is None or known[0] != state:
            known = state, live_items_by_version(connection, gallery.id, order)
            if len(self._counted) >= MAX_GALLERIES:  # most of these were deleted since
                self._counted.clear()
            self._counted[gallery.id] = known
        return known[1]
