"""`View`: the state of a gallery between two changes, and the plans of queries for it.

Every change makes a new view. Routes, maps and merge mode are computed by the first query that needs them and cached
here. While a caller reads the shards of a view, it must hold the gallery's lock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from index.edges.calibration import Calibration
from index.edges.graph import Route
from index.engines.base import Shard
from index.query.merge import Mode, choose_mode
from index.query.query_plan import Plan, PlannedShard
from index.query.search_result import Degraded
from index.query.topology import Topology
from index.version import ShardKey

MAX_CACHED = 256
"""Number of cached plans: one per query version, set of encoders and mode."""


@dataclass(frozen=True)
class Reach:
    """The shards that queries of a version reach.

    Attributes:
        routes: item version -> the route to it.
        degraded: the items that cannot be searched.
        encoders: the versions that must embed the queries; in an empty gallery the query version, so that its queries
            are checked.
    """

    routes: Mapping[str, Route]
    degraded: tuple[Degraded, ...]
    encoders: frozenset[str]


class View:
    """See the module."""

    def __init__(
        self,
        topology: Topology,
        shards: Mapping[ShardKey, Shard],
        left_out: tuple[Degraded, ...],
        current: str,
        seq: int,
    ) -> None:
        """`shards`: those that serve any item; `left_out`: items that are in no shard."""
        self.topology, self.shards, self.current, self.seq = topology, shards, current, seq
        self._left_out = left_out
        self.sizes = {key: shard.count() for key, shard in shards.items()}
        self.items_by_version: dict[str, int] = {}
        for (version, _), size in self.sizes.items():
            self.items_by_version[version] = self.items_by_version.get(version, 0) + size
        self.items = sum(self.sizes.values())
        self._rows_scanned: float = self.items - sum(shard.indexed_count() for shard in shards.values())
        if any(shard.is_remote for shard in shards.values()):
            self._rows_scanned = math.inf  # a query may wait for a server
        # Not lru_cache, whose reference cycle would keep this view and removed shards until garbage collection.
        self._reaches: dict[tuple[str, frozenset[str]], Reach] = {}
        self._plans: dict[tuple[str, frozenset[str], Mode | None], Plan] = {}

    def rows_scanned(self, query_version: str) -> float:
        """Number of items that a query of this version scans; infinite with a route or a remote engine."""
        if any(version != query_version for version in self.items_by_version):
            return math.inf
        return self._rows_scanned

    def reach(self, query_version: str, encoders: frozenset[str]) -> Reach:
        """The shards that queries of a version reach; `encoders`: other versions that can embed these queries."""
        if (found := self._reaches.get((query_version, encoders))) is None:
            if len(self._reaches) >= MAX_CACHED:
                self._reaches.clear()
            found = self._reaches[query_version, encoders] = self._reach(query_version, encoders)
        return found

    def plan(self, query_version: str, encoders: frozenset[str], mode: Mode | None) -> Plan:
        """The plan for queries of a version. Raises ModeUnavailable if the shards cannot be merged in this mode."""
        if (found := self._plans.get((query_version, encoders, mode))) is None:
            if len(self._plans) >= MAX_CACHED:
                self._plans.clear()
            made = self._plan(query_version, self.reach(query_version, encoders), mode)
            found = self._plans[query_version, encoders, mode] = made
        return found

    def _reach(self, query_version: str, encoders: frozenset[str]) -> Reach:
        routes, unreachable = self.topology.routes(query_version, self.items_by_version, encoders)
        needed = {version for route in routes.values() for version in route.encoders}
        asked = frozenset(needed) if self.items_by_version else frozenset([query_version])
        return Reach(routes, (*unreachable, *self._left_out), asked)

    def _plan(self, query_version: str, reach: Reach, mode: Mode | None) -> Plan:
        live = {key: shard for key, shard in self.shards.items() if key[0] in reach.routes}
        routes = [(reach.routes[version], origin) for version, origin in live]
        spaces = [self.topology.spaces[version] for version, _ in live]
        maps = self.topology.maps_for(routes)
        chosen = choose_mode(mode, spaces, maps is not None, self.topology.preferred(query_version, routes))
        used: list[Calibration | None] = [*maps] if maps and chosen is Mode.CALIBRATED else [None] * len(live)
        whole = sum(self.sizes[key] for key in live)
        shards = [
            PlannedShard(*key, shard, self.sizes[key], self.sizes[key] / whole, route, calibration)
            for (key, shard), (route, _), calibration in zip(live.items(), routes, used, strict=True)
        ]
        return Plan(reach.encoders, reach.degraded, shards, spaces, chosen)
