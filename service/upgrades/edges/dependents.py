"""The effect of an edge's removal on galleries, counted in memory, one gallery after the other; see `Counts`.

Galleries that do not use the edge, usually most of them, are skipped. The others may have to be loaded, which takes
seconds and memory, so they are counted before the transaction that removes the edge, for which all writers wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import Connection

from index.edges.graph import Graph
from index.version import EdgeKey
from service.errors import UnknownGallery
from service.registry.edge_records import EdgeRecord
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import preference, route_to
from service.registry.registry import Registry
from service.registry.trial_records import trial_versions
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica
from service.store.database.connections import Database
from service.store.galleries.held_versions import versions_emptied
from service.store.rows import GalleryRow


@dataclass(frozen=True)
class Rerouted:
    """Items of one version that queries reach along the edge: edge kinds of the routes with and without it, if any."""

    version: str
    items: int
    before: tuple[str, ...]
    after: tuple[str, ...] | None


@dataclass(frozen=True)
class Dependent:
    """The effect of an edge's removal on a gallery.

    Attributes:
        gallery: its name.
        version: the version of the affected queries: the current one, or one in shadow or canary.
        routes: the items that are now reached along the edge.
        moved: how many items another of their embeddings would serve.
        lost: how many items no route would reach any more.
    """

    gallery: str
    version: str
    routes: tuple[Rerouted, ...]
    moved: int
    lost: int


class Uncounted(Exception):
    """These galleries, or the edges, changed after they were counted, or they were not counted."""

    def __init__(self, galleries: Sequence[GalleryRow]) -> None:
        super().__init__()
        self.galleries = galleries


class Counts:
    """Counts the effect of one edge's removal on galleries."""

    def __init__(self, database: Database, registry: Registry, replica: Replica, key: EdgeKey) -> None:
        self._database, self._registry, self._replica, self._key = database, registry, replica, key
        # By gallery: its row and the edges when it was counted, and the result.
        self._results: dict[int, tuple[GalleryRow, tuple[EdgeRecord, ...], tuple[Dependent, ...]]] = {}
        # Gallery -> version in shadow or canary, when galleries were last locked.
        self._trials: Mapping[int, int] = {}
        # Galleries that changed after they were counted: kept in memory, to be counted under their locks.
        self._written_since: dict[int, LoadedGallery] = {}

    def of(self, connection: Connection, galleries: Sequence[GalleryRow]) -> tuple[Dependent, ...]:
        """The dependents of the edge among galleries whose locks are held.

        Raises:
            Uncounted: some must be counted first, see `count`.
        """
        self._trials = trial_versions(connection)
        # Most galleries have the same version, and finding all routes of a version takes time.
        asking = {gallery.id: self._query_versions(gallery) for gallery in galleries}
        along = {versions for versions in set(asking.values()) if self._is_affected(versions)}
        affected = [gallery for gallery in galleries if asking[gallery.id] in along]
        uncounted = [
            gallery for gallery in affected if gallery.id not in self._written_since and not self._is_counted(gallery)
        ]
        if uncounted:
            raise Uncounted(uncounted)
        results = [
            self._count_dependents(g, self._written_since[g.id])
            if g.id in self._written_since
            else self._results[g.id][2]
            for g in affected
        ]
        return tuple(d for of_gallery in results for d in of_gallery if d.routes or d.moved or d.lost)

    def count(self, galleries: Sequence[GalleryRow]) -> None:
        """Count galleries before they are locked."""
        for gallery in galleries:
            with suppress(UnknownGallery):  # deleted since
                loaded, edges = self._replica.get(gallery.id), self._registry.edges()
                if gallery.id in self._results:
                    self._written_since[gallery.id] = loaded
                self._results[gallery.id] = gallery, edges, self._count_dependents(gallery, loaded)

    def _is_counted(self, gallery: GalleryRow) -> bool:
        row, edges, _ = self._results.get(gallery.id, (None, None, None))
        return row == gallery and edges is self._registry.edges()

    def _is_affected(self, query_versions: tuple[LoadedVersion, ...]) -> bool:
        """Whether the edge is on a route of queries, or decides which embedding serves an item."""
        registry = self._registry
        routes = (
            route_to(registry, version, item_version) for version in query_versions for item_version in registry.all()
        )
        if any(route is not None and self._key in route.signature for route in routes):
            return True
        return preference(registry, query_versions[0]) != preference(
            registry, query_versions[0], without(registry, self._key)
        )

    def _query_versions(self, gallery: GalleryRow) -> tuple[LoadedVersion, ...]:
        """The versions that answer queries: the current one, and one in shadow or canary."""
        trial = self._trials.get(gallery.id)
        return self._registry.current_of(gallery), *(() if trial is None else (self._registry.by_id(trial),))

    def _count_dependents(self, gallery: GalleryRow, loaded: LoadedGallery) -> tuple[Dependent, ...]:
        self._replica.refresh(gallery.id)
        registry, current = self._registry, self._registry.current_of(gallery)
        graph = without(registry, self._key)
        with self._database.lookup() as connection:
            emptied = versions_emptied(connection, gallery.id)
        # Memory may still hold embeddings of emptied versions: these are last, for items without other embeddings.
        by_preference = preference(registry, current, graph)
        order = [version.name for version in sorted(by_preference, key=lambda version: version.id in emptied)]
        now, then = loaded.gallery.items_by_version(), loaded.gallery.items_by_version(order)
        moved = loaded.gallery.moved_by(order)
        return tuple(
            Dependent(
                gallery.name,
                version.name,
                self._rerouted(version, now, graph),
                moved if version is current else 0,
                _items_unreached(registry, version, then, graph) - _items_unreached(registry, version, now),
            )
            for version in self._query_versions(gallery)
        )

    def _rerouted(self, query_version: LoadedVersion, now: Mapping[str, int], graph: Graph) -> tuple[Rerouted, ...]:
        registry, routes = self._registry, []
        for name, items in now.items():
            before = route_to(registry, query_version, registry.named(name))
            if before is not None and self._key in before.signature:
                after = route_to(registry, query_version, registry.named(name), graph)
                routes.append(Rerouted(name, items, before.kinds, None if after is None else after.kinds))
        return tuple(routes)


def without(registry: Registry, key: EdgeKey) -> Graph:
    """The graph of all edges but one."""
    return Graph(edge for edge in registry.graph().edges if edge.key != key)


def _items_unreached(
    registry: Registry, current: LoadedVersion, items_by_version: Mapping[str, int], graph: Graph | None = None
) -> int:
    counted = items_by_version.items()
    return sum(items for name, items in counted if route_to(registry, current, registry.named(name), graph) is None)
