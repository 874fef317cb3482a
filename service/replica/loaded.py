"""`LoadedGallery`: one gallery in memory, with the registry's versions and edges and its current version applied to it.

Which embedding serves an item follows from the current version and the edges, and is not stored. So versions and edges
are declared to a gallery before items or another current version are applied.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from index.engines.digest import digests
from index.engines.remote.base import OpenCollection, no_engine
from index.errors import RegraftError
from index.events import Event
from index.gallery import Gallery
from index.query.edge_maps import Maps
from index.query.merge import Mode
from index.version import EdgeKey
from service.errors import NoCurrentVersion
from service.registry.edge_records import EdgeRecord
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import preference
from service.registry.registry import Registry
from service.registry.storing import AddedItems
from service.registry.trial_records import Trial
from service.replica.engines import name_of
from service.replica.feed import FeedChanges
from service.store.galleries.change_feed import FeedRow
from service.store.galleries.gallery import index_of
from service.store.rows import GalleryRow
from service.store.vectors.codec import is_location, locations_from_bytes, to_bytes

logger = logging.getLogger(__name__)

MAX_LOGGED = 10
"""Most keys of left-out items that a log line names."""


class LoadedGallery:
    """One gallery in memory."""

    def __init__(
        self, row: GalleryRow, registry: Registry, folder: Path, open_collection: OpenCollection = no_engine
    ) -> None:
        """`folder`: for its sealed segments; `open_collection`: opens one of its collections in engines."""
        self._registry = registry
        self.id = row.id
        self.name = row.name
        self.created = row.created
        self.engine_name = name_of(row)
        self.folder = folder
        self.gallery = Gallery(index_of(row), folder, open_collection)
        self.current: LoadedVersion | None = None
        self.trial: Trial | None = None
        # The gates whose calibrations are in force, and the edges when these were read.
        self.gates: tuple[int, ...] = ()
        self.followed_edges: tuple[EdgeRecord, ...] | None = None
        # The registry's state when all of it was declared here.
        self._declared_state: tuple[object, object] | None = None
        # The declared versions, and the number of each declared edge.
        self._declared: set[int] = set()
        self._edges: dict[EdgeKey, int] = {}
        self._declaring = threading.Lock()
        # Held from reading committed changes until they are applied.
        self.applying = threading.Lock()
        # The database's timeline before anything was read, see `Database.timeline`.
        self.timeline: str | None = None
        # The feed number of its last snapshot, and the number of unsealed embeddings then.
        self.snapshot_seq = 0
        self.unsealed_at_snapshot = 0
        # For the cache: its size, and when it was used last.
        self.bytes = 0
        self.used = 0.0

    @property
    def seq(self) -> int:
        """Its position in the change feed."""
        return self.gallery.seq

    def is_at(self, seq: int, current_id: int | None) -> bool:
        """Whether it has this feed number and current version, that is, has followed everything but edges."""
        return self.seq == seq and current_id == (self.current and self.current.id)

    def is_of_other(self, timeline: str | None) -> bool:
        """Whether the database is on another timeline now, in which its feed numbers may stand for other changes."""
        return timeline is not None and timeline != self.timeline

    def check_current(self) -> None:
        """Raise NoCurrentVersion if no version is deployed."""
        if self.current is None:
            raise NoCurrentVersion.of(self.name)

    def apply(
        self,
        changes: FeedChanges,
        seq: int | None = None,
        current: LoadedVersion | None = None,
        calibrations: tuple[Maps, Mapping[str, Mode]] | None = None,
    ) -> None:
        """Apply changes in one step; what is None stays unchanged. See `Gallery.apply`."""
        self.declare()
        name = None if current is None else current.name
        arguments = (changes.placed, changes.removed, changes.items, changes.missing)
        with self._declaring:  # no other thread may set an order by another current version in between
            self.gallery.apply(*arguments, seq, name, calibrations, self._order(current or self.current))
            self.current = current or self.current
        if changes.damaged:
            logger.error(Event("damaged_embeddings", gallery=self.name, items=changes.damaged))
        if changes.missing:
            keys = sorted(changes.missing)[:MAX_LOGGED]
            why = "; ".join(sorted({missing.reason for missing in changes.missing.values()}))
            logger.error(Event("items_left_out", gallery=self.name, items=len(changes.missing), keys=keys, reason=why))

    def extend(self, added: AddedItems) -> bool:
        """Apply a batch if it is next in the feed; False: it is not, or the current version differs."""
        first, last = added.seqs
        with self.applying:
            if self.seq != first - 1 or self.current is not added.current:
                return False
            self.apply(FeedChanges({added.place: ([*added.items], added.vectors)}, items=added.items), last)
            self.bytes = self.gallery.bytes()
        return True

    def fill_from_memory(self, rows: Sequence[FeedRow]) -> list[bytes | None]:
        """The vector of each feed row; for one stored in a file, the copy in memory, else its location in the file."""
        vectors_or_locations = [row[3] for row in rows]
        by_place: dict[tuple[int, str], list[int]] = defaultdict(list)
        for n, (_, version_id, origin, *_) in enumerate(rows):
            if version_id is not None and origin is not None:
                by_place[version_id, origin].append(n)
        for (version_id, origin), at in by_place.items():
            place = (self._registry.by_id(version_id).name, origin)
            in_memory, vectors = self.gallery.in_memory(place, np.array([rows[n][0] for n in at]))
            locations = locations_from_bytes([one for n in at if is_location(one := vectors_or_locations[n])])
            stored_digests = locations["digest"]
            same = digests(vectors) == stored_digests[in_memory]
            for n, vector in zip(np.array(at)[in_memory][same].tolist(), vectors[same], strict=True):
                vectors_or_locations[n] = to_bytes(vector)
        return vectors_or_locations

    def declare(self) -> None:
        """Declare the registry's versions and edges to the gallery, and remove edges that the registry lacks."""
        if self.is_declared():
            return
        with self._declaring:
            state = self._registry.state()
            edges = self._registry.edges()  # before the versions, so that both ends of each edge are among them
            for version in self._registry.all():
                if version.id not in self._declared:
                    # Without the edges it came with: they may have been removed; the current ones follow.
                    self.gallery.declare(replace(version.version, edges=()))
                    self._declared.add(version.id)
            # An edge that was opened before its files were damaged stays usable.
            usable = {d.edge.key: d for d in edges if not d.problem or self._edges.get(d.edge.key) == d.id}
            for key, declared in usable.items():
                if self._edges.get(key) != declared.id:
                    self._add_edge(declared)
            # Between adding and removing edges, so that items are always reachable.
            self.gallery.set_version_order(self._order(self.current))
            for key in set(self._edges) - set(usable):
                self.gallery.remove_edge(key)
                del self._edges[key]
            # The next query retries an edge that could not be opened.
            self._declared_state = state if set(self._edges) == set(usable) else None

    def is_declared(self) -> bool:
        """Whether everything in the registry is declared."""
        declared, now = self._declared_state, self._registry.state()
        return declared is not None and declared[0] is now[0] and declared[1] is now[1]

    def moving(self, current: LoadedVersion) -> int:
        """How many live items another embedding would serve if this version were current."""
        return self.gallery.moved_by(self._order(current))

    def _order(self, current: LoadedVersion | None) -> list[str]:
        return [version.name for version in preference(self._registry, current)]

    def _add_edge(self, declared: EdgeRecord) -> None:
        key = declared.edge.key
        try:
            with self._registry.opening(declared.edge):
                self.gallery.add_edge(declared.edge)
            self._edges[key] = declared.id
        except (RegraftError, OSError):  # damaged since its check, or removed: queries continue without it
            if any(known.id == declared.id for known in self._registry.edges()):
                logger.exception(Event("edge_not_opened", gallery=self.name, edge=key))
            self.gallery.remove_edge(key)
            self._edges.pop(key, None)
