"""`LoadedGallery`: one gallery in memory, and all that it is told: items, versions, edges, what is current.

Which embedding serves an item follows from the current version and the edges: no row says it. So whoever tells a
gallery of items, or of another current version, tells it of versions and edges first.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from index.edge_maps import Maps
from index.engines.digest import digests
from index.engines.remote import OpenCollection, no_engine
from index.errors import RegraftError
from index.events import Event
from index.gallery import Gallery
from index.merge import Mode
from index.version import EdgeKey
from service.errors import NoCurrentVersion
from service.registry.edge_records import EdgeRecord
from service.registry.placement import preference
from service.registry.registry import LoadedVersion, Registry
from service.registry.rollout_records import Rollout
from service.registry.storing import AddedItems
from service.replica.engines import name_of
from service.replica.feed import FeedChanges
from service.store.repository import FeedRow, index_of
from service.store.rows import GalleryRow
from service.store.vector_codec import is_place, places_from_bytes, to_bytes

logger = logging.getLogger(__name__)

LOGGED = 10
"""Keys of items left out that the log names."""


class LoadedGallery:
    """One gallery in memory."""

    def __init__(
        self, row: GalleryRow, registry: Registry, folder: Path, elsewhere: OpenCollection = no_engine
    ) -> None:
        """`folder`: of its sealed segments; `elsewhere`: opens its collections in engines."""
        self._registry = registry
        self.id = row.id
        self.name = row.name
        self.created = row.created
        self.engine_name = name_of(row)
        self.folder = folder
        self.gallery = Gallery(index_of(row), folder, elsewhere)
        self.current: LoadedVersion | None = None
        self.rollout: Rollout | None = None
        # The gates whose calibrations are in force, and the edges there were when these were read.
        self.gates: tuple[int, ...] = ()
        self.seen_edges: tuple[EdgeRecord, ...] | None = None
        # What the registry stood at when all it has was declared here.
        self._seen_standing: tuple[object, object] | None = None
        # The versions it knows, and the number of each edge it knows.
        self._declared: set[int] = set()
        self._edges: dict[EdgeKey, int] = {}
        self._declaring = threading.Lock()
        # Held from the look at what was committed until it is applied.
        self.applying = threading.Lock()
        # The number of its last snapshot, and the embeddings that were in no segment then.
        self.snapshot_seq = 0
        self.snapshot_unsealed = 0
        # For the cache: what it takes, and when it was asked for last.
        self.bytes = 0
        self.used = 0.0

    @property
    def seq(self) -> int:
        """Its position in the change feed."""
        return self.gallery.seq

    def stands_at(self, seq: int, current_id: int | None) -> bool:
        """Whether it has taken in all up to this number of the feed, which is all there is to know but for edges."""
        return self.seq == seq and current_id == (self.current and self.current.id)

    def check_current(self) -> None:
        """Raise NoCurrentVersion when none is deployed."""
        if self.current is None:
            raise NoCurrentVersion(f"gallery {self.name!r} has no current version: deploy one first")

    def apply(
        self,
        found: FeedChanges,
        seq: int | None = None,
        current: LoadedVersion | None = None,
        fitted: tuple[Maps, Mapping[str, Mode]] | None = None,
    ) -> None:
        """Take in what items hold now, in one step; None: as before. See `Gallery.apply`."""
        self.declare()
        name = None if current is None else current.name
        taken = (found.placed, found.removed, found.items, found.missing)
        with self._declaring:  # an order by another current version must not come in between
            self.gallery.apply(*taken, seq, name, fitted, self._order(current or self.current))
            self.current = current or self.current
        if found.damaged:
            logger.error(Event("damaged_embeddings", gallery=self.name, items=found.damaged))
        if found.missing:
            some = sorted(found.missing)[:LOGGED]
            why = "; ".join(sorted({missing.reason for missing in found.missing.values()}))
            logger.error(Event("items_left_out", gallery=self.name, items=len(found.missing), keys=some, reason=why))

    def extend(self, added: AddedItems) -> bool:
        """Take in a batch that is next in the feed; False: it is not."""
        first, last = added.seqs
        with self.applying:
            if self.seq != first - 1 or self.current is not added.current:
                return False
            self.apply(FeedChanges({added.place: ([*added.items], added.vectors)}, items=added.items), last)
            self.bytes = self.gallery.bytes()
        return True

    def at_hand(self, rows: Sequence[FeedRow]) -> list[bytes | None]:
        """Of rows whose vectors lie in files: those vectors that are in memory, and of the others where they lie."""
        found = [row[3] for row in rows]
        by_place: dict[tuple[int, str], list[int]] = defaultdict(list)
        for n, (_, version_id, origin, *_) in enumerate(rows):
            if version_id is not None and origin is not None:
                by_place[version_id, origin].append(n)
        for (version_id, origin), at in by_place.items():
            place = (self._registry.by_id(version_id).name, origin)
            here, vectors = self.gallery.in_memory(place, np.array([rows[n][0] for n in at]))
            wanted = places_from_bytes([one for n in at if is_place(one := found[n])])["digest"]
            same = digests(vectors) == wanted[here]
            for n, vector in zip(np.array(at)[here][same].tolist(), vectors[same], strict=True):
                found[n] = to_bytes(vector)
        return found

    def declare(self) -> None:
        """Make the catalog's versions and edges known to it, and have it forget the edges that are gone."""
        if self.is_declared():
            return
        with self._declaring:
            standing = self._registry.standing()
            edges = self._registry.edges()  # before the versions, so that both ends of each edge are among them
            for registered in self._registry.all():
                if registered.id not in self._declared:
                    # The edges a version came with may have been removed since; those there are follow.
                    self.gallery.declare(replace(registered.version, edges=()))
                    self._declared.add(registered.id)
            # One that was opened before its files changed is as good as ever.
            known = {d.edge.key: d for d in edges if not d.problem or self._edges.get(d.edge.key) == d.id}
            for key, declared in known.items():
                if self._edges.get(key) != declared.id:
                    self._add_edge(declared)
            # In between, so that what serves an item can be reached at every moment.
            self.gallery.set_version_order(self._order(self.current))
            for key in set(self._edges) - set(known):
                self.gallery.remove_edge(key)
                del self._edges[key]
            # One that could not be opened is tried again by the next query.
            self._seen_standing = standing if set(self._edges) == set(known) else None

    def is_declared(self) -> bool:
        """Whether it knows all that the registry has."""
        seen, now = self._seen_standing, self._registry.standing()
        return seen is not None and seen[0] is now[0] and seen[1] is now[1]

    def moving(self, current: LoadedVersion) -> int:
        """Live items that another embedding would serve if this version were current."""
        return self.gallery.moved_by(self._order(current))

    def _order(self, current: LoadedVersion | None) -> list[str]:
        return [held.name for held in preference(self._registry, current)]

    def _add_edge(self, declared: EdgeRecord) -> None:
        key = declared.edge.key
        try:
            with self._registry.opening(declared.edge):
                self.gallery.add_edge(declared.edge)
            self._edges[key] = declared.id
        except (RegraftError, OSError):  # damaged since it was looked at, or gone: queries go on without it
            if any(known.id == declared.id for known in self._registry.edges()):
                logger.exception(Event("edge_not_opened", gallery=self.name, edge=key))
            self.gallery.remove_edge(key)
            self._edges.pop(key, None)
