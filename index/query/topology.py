"""`Topology`: the versions of one gallery, the edges between them, and the maps that make their scores comparable.

Immutable: a change returns a copy, which keeps everything that is still valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from index.edges.calibration import Calibration
from index.edges.graph import Graph, Route
from index.edges.transform import Transform, load_transform
from index.query.edge_maps import Maps, check_calibration, common_mode, edge_maps, map_key, preferred_mode
from index.query.merge import Mode
from index.query.search_result import Degraded
from index.space import Space, space_from_json
from index.version import Edge, EdgeKey, Version


@dataclass(frozen=True, eq=False)
class Topology:
    """The versions of a gallery, their edges and their score maps.

    Attributes:
        versions: by name.
        spaces: by version.
        graph: the edges.
        transforms: the opened transforms of the edges.
        own_maps: score maps fitted on data of this gallery.
        edge_maps: score maps stored in the edges.
        modes: query version -> the merge mode measured to be best for it here.
    """

    versions: Mapping[str, Version] = field(default_factory=dict)
    spaces: Mapping[str, Space] = field(default_factory=dict)
    graph: Graph = field(default_factory=Graph)
    transforms: Mapping[EdgeKey, Transform] = field(default_factory=dict)
    own_maps: Maps = field(default_factory=dict)
    edge_maps: Maps = field(default_factory=dict)
    modes: Mapping[str, Mode] = field(default_factory=dict)

    def declared(self, version: Version, transforms: Mapping[EdgeKey, Transform]) -> Topology:
        """A copy with this version; the edges in its folder replace all edges from it."""
        known = replace(
            self,
            versions={**self.versions, version.name: version},
            spaces={**self.spaces, version.name: space_from_json(version.card.space)},
        )
        return known.connected((*(e for e in self.graph.edges if e.new != version.name), *version.edges), transforms)

    def connected(self, edges: Iterable[Edge], transforms: Mapping[EdgeKey, Transform] | None = None) -> Topology:
        """A copy with exactly these edges, without maps and modes of removed ones. `transforms`: of the new edges."""
        graph = Graph(edges)
        gone = {edge.key for edge in self.graph.edges if edge not in graph.edges}
        opened = {**self.transforms, **(transforms or {})}
        return replace(
            self,
            graph=graph,
            transforms={edge.key: opened[edge.key] for edge in graph.edges},
            own_maps={key: own for key, own in self.own_maps.items() if gone.isdisjoint(key[3])},
            modes={v: mode for v, mode in self.modes.items() if v not in {key[0] for key in gone}},
            edge_maps=edge_maps(graph.edges, self.versions),
        )

    def calibrated(self, maps: Maps, modes: Mapping[str, Mode]) -> Topology:
        """A copy with these maps and modes instead of the gallery's own."""
        return replace(self, own_maps=dict(maps), modes=dict(modes))

    def opened(self, edge: Edge, new: Version) -> Transform:
        """Open the transform of an edge. Raises InvalidVersionFolder if it does not fit the two cards."""
        old = self.versions[edge.old].card
        check_calibration(edge, new.card, old)
        return load_transform(edge, new.card, old)

    def transform(self, edge: Edge) -> Transform:
        """The transform of an edge of the graph."""
        return self.transforms[edge.key]

    def routes(
        self, query_version: str, items_by_version: Mapping[str, int], encoders: frozenset[str]
    ) -> tuple[dict[str, Route], tuple[Degraded, ...]]:
        """Item version -> the route to it; and the items of the versions without a route."""
        planned = {version: self.graph.route(query_version, version, encoders) for version in items_by_version}
        degraded = tuple(
            Degraded(version, items_by_version[version], self.graph.unreachable(query_version, version, encoders))
            for version, route in planned.items()
            if route is None
        )
        return {version: route for version, route in planned.items() if route is not None}, degraded

    def maps_for(self, routes: Sequence[tuple[Route, str]]) -> list[Calibration] | None:
        """The map of each shard, all from one source; None if no source has all. `routes`: as in `preferred`."""
        keys = [map_key(route, origin) for route, origin in routes]
        for maps in (self.own_maps, self.edge_maps):
            if all(key in maps for key in keys):
                return [maps[key] for key in keys]
        return None

    def preferred(self, query_version: str, routes: Sequence[tuple[Route, str]]) -> Mode:
        """The merge mode measured on this gallery, else the one that the edges of the routes prefer.

        `routes`: of each shard, the route to it and its origin.
        """
        measured = self.modes.get(query_version)
        # Without a preference: raw, so that scores are as before the upgrade, for queries with a threshold.
        return measured or common_mode(preferred_mode(route, origin) for route, origin in routes) or Mode.RAW
