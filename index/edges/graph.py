"""Routes along edges: how a query of one version reaches the items of another. Read `Graph.route`, then `follow`.

Query edges compose (v3 -> v2 -> v1). A `slerp` edge also needs the old encoder, so it only serves queries that this
encoder can embed. `dual` uses the old encoder alone and is the last resort. Item edges (`forward`) are never part of a
route; a `transform` backfill applies them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from index.edges.transform import Transform
from index.space import Vectors
from index.version import Edge, EdgeKey, EdgeKind

MAX_CACHED = 4096
"""Number of cached routes."""


@dataclass(frozen=True)
class Route:
    """How queries of `query_version` reach items of `item_version`: embed the query, then apply `edges` in order.

    `edges` is empty if the two versions are the same; a `dual` route has exactly one edge.
    """

    query_version: str
    item_version: str
    edges: tuple[Edge, ...] = ()

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its edges, in order."""
        return tuple(e.kind.value for e in self.edges)

    @cached_property
    def dual(self) -> bool:
        """Whether the encoder of the item version embeds the query."""
        return EdgeKind.DUAL in self.kinds

    @cached_property
    def encoders(self) -> tuple[str, ...]:
        """The versions that must embed the query, first the one where the route starts."""
        if self.dual:
            return (self.item_version,)
        return (self.query_version, *(e.old for e in self.edges if e.kind is EdgeKind.SLERP))

    @cached_property
    def signature(self) -> tuple[EdgeKey, ...]:
        """The keys of its edges, which identify it among the routes between two versions; used as key of score maps."""
        return tuple(e.key for e in self.edges)

    @property
    def measured(self) -> float:
        """The score of the weakest edge; 1 without edges."""
        return min((e.measured for e in self.edges), default=1.0)


def follow(route: Route, opened: Callable[[Edge], Transform], queries: Mapping[str, Vectors]) -> Vectors:
    """Transform queries along a route -> (Q, dimension of the item version), ready to scan the shard.

    Args:
        route: the route to the shard.
        opened: edge -> its transform.
        queries: version -> the queries embedded by it (Q, its dimension), for each of `route.encoders`.
    """
    moved_QD = queries[route.encoders[0]]
    for edge in () if route.dual else route.edges:
        moved_QD = opened(edge)(moved_QD, queries.get(edge.old))
    return moved_QD


class Graph:
    """All declared edges between versions; of several with the same key, the last. Immutable."""

    def __init__(self, edges: Iterable[Edge] = ()) -> None:
        self.edges = tuple({edge.key: edge for edge in edges}.values())
        self._leading: dict[str, list[Edge]] = {}
        for edge in sorted(self.edges, key=lambda e: (-e.measured, e.key)):
            if edge.kind.direction == "query" and edge.kind is not EdgeKind.DUAL:
                self._leading.setdefault(edge.new, []).append(edge)
        self._remembered = lru_cache(MAX_CACHED)(self._plan)

    def route(self, query_version: str, item_version: str, encoders: frozenset[str]) -> Route | None:
        """The best route from queries of one version to items of another.

        Args:
            query_version: the version that embedded the query.
            item_version: the version of the items.
            encoders: other versions that can embed this query (empty if the query is an embedding).

        Returns:
            The route with the best weakest edge, then the fewest hops; `dual` if there is no other and the item version
            can embed the query; None if there is no route.
        """
        return self._remembered(query_version, item_version, encoders)

    def unreachable(self, query_version: str, item_version: str, encoders: frozenset[str]) -> str:
        """The message why there is no route: what is missing, and what would help."""
        way = f"from version {query_version!r} to {item_version!r}"
        everyone = frozenset(self.versions())
        path = self._best_path(query_version, item_version, everyone)
        if path is not None:
            needed = ", ".join(
                sorted({repr(v) for v in Route(query_version, item_version, path).encoders[1:] if v not in encoders})
            )
            return f"the edges {way} need the encoder of {needed}, which cannot embed this query"
        carried = self._carried(item_version)
        over = next((v for v in carried if self._best_path(query_version, v, everyone) is not None), None)
        if over is not None:
            return f"only an item edge leads {way}: a transform backfill to {over!r} would make these items reachable"
        return f"no edge leads {way}"

    def forward(self, old: str, new: str) -> Edge | None:
        """The item edge that a `transform` backfill from `old` to `new` applies."""
        return next((e for e in self.edges if (e.old, e.new) == (old, new) and e.kind is EdgeKind.FORWARD), None)

    def versions(self) -> set[str]:
        """All versions that have an edge."""
        return {name for edge in self.edges for name in (edge.new, edge.old)}

    def _plan(self, query_version: str, item_version: str, encoders: frozenset[str]) -> Route | None:
        path = self._best_path(query_version, item_version, encoders)
        if path is not None:
            return Route(query_version, item_version, path)
        if item_version in encoders:
            return Route(query_version, item_version, (Edge(query_version, item_version, EdgeKind.DUAL),))
        return None

    def _best_path(self, new: str, old: str, encoders: frozenset[str]) -> tuple[Edge, ...] | None:
        """Fewest hops over edges no weaker than the best weakest edge (bottleneck shortest path, Pollack 1960)."""
        worth = self._widest(new, encoders)
        if old not in worth:
            return None
        paths: dict[str, tuple[Edge, ...]] = {new: ()}
        waiting = [new]
        for at in waiting:  # grows in the loop: breadth-first search
            for edge in self._steps(at, encoders):
                if edge.measured >= worth[old] and edge.old not in paths:
                    paths[edge.old] = (*paths[at], edge)
                    waiting.append(edge.old)
        return paths[old]

    def _widest(self, new: str, encoders: frozenset[str]) -> dict[str, float]:
        """Reachable version -> score of the weakest edge of the path where it is best (widest path, by Dijkstra)."""
        worth: dict[str, float] = {}
        waiting = [(-float("inf"), new)]
        while waiting:
            weakest, at = heapq.heappop(waiting)
            if at in worth:
                continue
            worth[at] = -weakest
            for edge in self._steps(at, encoders):
                heapq.heappush(waiting, (max(weakest, -edge.measured), edge.old))
        return worth

    def _steps(self, at: str, encoders: frozenset[str]) -> Iterator[Edge]:
        """The query edges from a version that this query can use, best first."""
        return (e for e in self._leading.get(at, ()) if e.kind is not EdgeKind.SLERP or e.old in encoders)

    def _carried(self, old: str) -> list[str]:
        """The versions that item edges reach from `old`, nearest first."""
        reached = [old]
        for at in reached:  # grows while it is walked
            reached += [
                e.new for e in self.edges if e.kind is EdgeKind.FORWARD and e.old == at and e.new not in reached
            ]
        return reached[1:]
