"""What becomes of galleries when an edge goes, counted in memory, one gallery after the other.

Most galleries use no given edge, and are not looked at. One that does may have to be loaded, which takes seconds and
room: that is done before the transaction that removes the edge, in which every gallery's writers wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import Connection

from index.graph import Graph
from index.version import EdgeKey
from service.errors import UnknownGallery
from service.registry.edge_records import EdgeRecord
from service.registry.placement import preference, route_to
from service.registry.registry import LoadedVersion, Registry
from service.registry.rollout_records import deployed
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica
from service.store.database import Database
from service.store.repository import versions_emptied
from service.store.rows import GalleryRow


@dataclass(frozen=True)
class Rerouted:
    """Items of one version that queries reach along the edge; `after` is the route without it, None: there is none."""

    version: str
    items: int
    before: tuple[str, ...]
    after: tuple[str, ...] | None


@dataclass(frozen=True)
class Dependent:
    """What removing an edge does to a gallery.

    Attributes:
        gallery: its name.
        version: the one whose queries lose: its current version, or one that is tried out there.
        routes: what is reached along the edge now.
        moved: items that another embedding they hold serves then.
        lost: items that no route reaches any more.
    """

    gallery: str
    version: str
    routes: tuple[Rerouted, ...]
    moved: int
    lost: int


class Uncounted(Exception):
    """Nobody has counted these galleries as they are now."""

    def __init__(self, galleries: Sequence[GalleryRow]) -> None:
        super().__init__()
        self.galleries = galleries


class Counts:
    """What becomes of the galleries without one edge."""

    def __init__(self, database: Database, registry: Registry, replica: Replica, key: EdgeKey) -> None:
        self._database, self._registry, self._replica, self._key = database, registry, replica, key
        # By gallery: as what it was counted, with which edges, and what was found.
        self._found: dict[int, tuple[GalleryRow, tuple[EdgeRecord, ...], tuple[Dependent, ...]]] = {}
        # Those that were written since they were counted: they stay in memory.
        self._live: dict[int, LoadedGallery] = {}

    def of(self, connection: Connection, galleries: Sequence[GalleryRow]) -> tuple[Dependent, ...]:
        """Of galleries whose locks are held: those that the edge does something for.

        Raises:
            Uncounted: some are to be counted first.
        """
        touched = [gallery for gallery in galleries if self._is_touched(connection, gallery)]
        late = [gallery for gallery in touched if gallery.id not in self._live and not self._is_known(gallery)]
        if late:
            raise Uncounted(late)
        found = [self._counted(g, self._live[g.id]) if g.id in self._live else self._found[g.id][2] for g in touched]
        return tuple(d for of_one in found for d in of_one if d.routes or d.moved or d.lost)

    def count(self, galleries: Sequence[GalleryRow]) -> None:
        """Count galleries while nobody waits."""
        for gallery in galleries:
            with suppress(UnknownGallery):  # deleted since
                live, edges = self._replica.get(gallery.id), self._registry.edges()
                if gallery.id in self._found:
                    self._live[gallery.id] = live
                self._found[gallery.id] = gallery, edges, self._counted(gallery, live)

    def _is_known(self, gallery: GalleryRow) -> bool:
        row, edges, _ = self._found.get(gallery.id, (None, None, None))
        return row == gallery and edges is self._registry.edges()

    def _is_touched(self, connection: Connection, gallery: GalleryRow) -> bool:
        """Whether the edge is on any way of its queries, or decides which embedding serves an item."""
        registry, asking = self._registry, self._asking(connection, gallery)
        routes = (route_to(registry, version, held) for version in asking for held in registry.all())
        if any(route is not None and self._key in route.signature for route in routes):
            return True
        return preference(registry, asking[0]) != preference(registry, asking[0], without(registry, self._key))

    def _asking(self, connection: Connection, gallery: GalleryRow) -> list[LoadedVersion]:
        """The versions that queries go through: the current one, and one that is tried out."""
        trial, _ = deployed(connection, self._registry, gallery.id)
        return [self._registry.current_of(gallery), *([] if trial is None else [trial.version])]

    def _counted(self, gallery: GalleryRow, live: LoadedGallery) -> tuple[Dependent, ...]:
        self._replica.refresh(gallery.id)
        registry, current = self._registry, self._registry.current_of(gallery)
        graph = without(registry, self._key)
        with self._database.lookup() as connection:
            gone, asking = versions_emptied(connection, gallery.id), self._asking(connection, gallery)
        # Memory may still count what they held: their items are those that it knows nothing else of.
        order = [held.name for held in sorted(preference(registry, current, graph), key=lambda held: held.id in gone)]
        now, then = live.gallery.items_by_version(), live.gallery.items_by_version(order)
        moved = live.gallery.moved_by(order)
        return tuple(
            Dependent(
                gallery.name,
                version.name,
                self._rerouted(version, now, graph),
                moved if version is current else 0,
                _unreached(registry, version, then, graph) - _unreached(registry, version, now),
            )
            for version in asking
        )

    def _rerouted(self, asking: LoadedVersion, now: Mapping[str, int], graph: Graph) -> tuple[Rerouted, ...]:
        registry, routes = self._registry, []
        for name, items in now.items():
            before = route_to(registry, asking, registry.named(name))
            if before is not None and self._key in before.signature:
                after = route_to(registry, asking, registry.named(name), graph)
                routes.append(Rerouted(name, items, before.kinds, None if after is None else after.kinds))
        return tuple(routes)


def without(registry: Registry, key: EdgeKey) -> Graph:
    """All edges but one."""
    return Graph(edge for edge in registry.graph().edges if edge.key != key)


def _unreached(
    registry: Registry, current: LoadedVersion, items_by_version: Mapping[str, int], graph: Graph | None = None
) -> int:
    counted = items_by_version.items()
    return sum(items for name, items in counted if route_to(registry, current, registry.named(name), graph) is None)
