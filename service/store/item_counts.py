"""How many items each version serves in galleries that are not loaded: counting reads every item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection

from service.store.repository import live_items_by_version
from service.store.rows import GalleryRow

MAX_GALLERIES = 10_000
"""Galleries whose counts are kept."""


class ItemCountCache:
    """Counts again only when items of the gallery were written since, or another version or edge has come."""

    def __init__(self) -> None:
        self._counted: dict[int, tuple[tuple[int, Sequence[int]], Mapping[int, int]]] = {}

    def of(self, connection: Connection, gallery: GalleryRow, order: Sequence[int]) -> Mapping[int, int]:
        """`live_items_by_version`, as of the snapshot of `connection` in which the row was read."""
        state = (gallery.next_seq, order)
        known = self._counted.get(gallery.id)
        if known is None or known[0] != state:
            known = state, live_items_by_version(connection, gallery.id, order)
            if len(self._counted) >= MAX_GALLERIES:  # most of them were deleted since
                self._counted.clear()
            self._counted[gallery.id] = known
        return known[1]
