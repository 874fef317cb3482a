"""From edges to routes: how a query of one version reaches the items of another.

Query edges compose (v3 -> v2 -> v1); `dual` asks the old encoder and is the last resort; item edges (`forward`) are
not part of a query's route, a `transform` backfill applies them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from index.version import Edge, EdgeKind


@dataclass(frozen=True)
class Route:
    """How queries reach one shard: encode by version `encoder`, then apply `edges` in order.

    `kinds` names the steps for a user; none when query and items share their version.
    """

    encoder: str
    item_version: str
    edges: tuple[Edge, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The edge kinds on the way."""
        return tuple(e.kind.value for e in self.edges)

    @property
    def measured(self) -> float:
        """A chain is worth its weakest edge."""
        return min((e.measured for e in self.edges), default=1.0)


class Graph:
    """All declared edges between versions."""

    def __init__(self, edges: Iterable[Edge] = ()) -> None:
        self.edges = tuple(edges)

    def route(self, query_version: str, item_version: str, encoders: frozenset[str]) -> Route | None:
        """The best route from queries of one version to items of another.

        Args:
            query_version: what the query is embedded by.
            item_version: the shard to reach.
            encoders: versions that can encode this very query (empty for one that arrives as an embedding).

        Returns:
            The route whose weakest edge measured best, then the one with fewer hops; `dual` when there is no other
            and the item version's encoder is at hand; None when the shard cannot be reached.
        """
        routes = [Route(query_version, item_version, path) for path in self._paths(query_version, item_version)]
        if routes:
            return max(routes, key=lambda r: (r.measured, -len(r.edges)))
        if item_version in encoders:
            return Route(item_version, item_version, (Edge(query_version, item_version, EdgeKind.DUAL),))
        return None

    def forward(self, old: str, new: str) -> Edge | None:
        """The item edge that a `transform` backfill from `old` to `new` applies."""
        return next((e for e in self.edges if (e.old, e.new) == (old, new) and e.kind is EdgeKind.FORWARD), None)

    def _paths(self, new: str, old: str, passed: frozenset[str] = frozenset()) -> list[tuple[Edge, ...]]:
        if new == old:
            return [()]
        passed |= {new}
        steps = [e for e in self.edges if e.new == new and e.kind.direction == "query" and e.old not in passed]
        return [(edge, *rest) for edge in steps for rest in self._paths(edge.old, old, passed)]
