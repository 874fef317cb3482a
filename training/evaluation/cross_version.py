"""Queries of one version among the items of another: brought together along declared edges only, as in a gallery.

Shape suffixes: Q queries, N items, D dimension, S side-information.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np

from index.edges.graph import Graph, Route, follow
from index.edges.transform import TransformedItems
from index.errors import InvalidArgument
from index.evaluation.metrics import Compared
from index.evaluation.ordering import hyperbolic_uncertainty
from index.space import Lorentz, Vectors
from index.version import EdgeKind, Version
from training.evaluation.edges import open_forward, open_query_edge
from training.evaluation.embeddings import VersionEmbeddings


@dataclass(frozen=True)
class CrossVersion:
    """Queries and items in one space, and the kinds of the edges that brought them there (none: one version)."""

    compared: Compared
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class MovedItems:
    """Items of an older version as a `transform` backfill leaves them.

    Attributes:
        version: name of the version whose space they are in.
        items: the vectors, and the other outputs of the last edge.
        kinds: of the edges on the way; empty where no item has moved.
    """

    version: str
    items: TransformedItems
    kinds: tuple[str, ...] = ()


class CrossVersions:
    """All versions under evaluation and the edges between them.

    Args:
        embeddings: each version's embeddings of the data, by name.

    Raises:
        InvalidVersionFolder: an edge does not fit the two versions.
        NoEncoder: an edge has a model, and onnxruntime is not installed.
    """

    def __init__(self, embeddings: Mapping[str, VersionEmbeddings]) -> None:
        self.embeddings = dict(embeddings)
        edges = [edge for one in embeddings.values() for edge in one.version.edges if edge.old in embeddings]
        self.graph = Graph(edges)
        self.queries = {
            edge.key: open_query_edge(edge, embeddings[edge.new], embeddings[edge.old])
            for edge in edges
            if edge.kind is not EdgeKind.FORWARD
        }
        self.forwards = {
            (edge.new, edge.old): open_forward(edge, embeddings[edge.new], embeddings[edge.old])
            for edge in edges
            if edge.kind is EdgeKind.FORWARD
        }

    def declared(self, new: str, old: str) -> CrossVersion | None:
        """Queries of `new` and items of `old` along query edges; where there are none, items moved by forward edges.

        None: no declared edge connects them. Asking the old encoder instead (`dual`) is M(old/old), no measurement.
        """
        for moved in self.moved(old):
            route = self.graph.route(new, moved.version, frozenset(self.embeddings))
            if route is not None and not route.dual:
                queries_QD = self._follow(route)
                space = self.embeddings[moved.version].space
                return CrossVersion(Compared(queries_QD, moved.items.vectors_ND, space), (*moved.kinds, *route.kinds))
        return None

    def unmoved(self, new: str, old: str) -> CrossVersion:
        """Queries of `new` and items of `old` that no backfill has moved: by query edges, at worst by `dual`."""
        route = self.graph.route(new, old, frozenset(self.embeddings))
        assert route is not None
        items = self.embeddings[old]
        return CrossVersion(Compared(self._follow(route), items.items_ND, items.space), route.kinds)

    def reencoded(self, new: str) -> Compared:
        """Queries and items of one version."""
        return Compared(self.embeddings[new].queries_QD, self.embeddings[new].items_ND, self.embeddings[new].space)

    def transformed(self, new: str, old: str) -> CrossVersion | None:
        """Queries of `new` and items of `old` moved to its space by forward edges; None where none lead there."""
        moved = self._moved_to(new, old)
        if moved is None:
            return None
        own = self.embeddings[new]
        return CrossVersion(Compared(own.queries_QD, moved.items.vectors_ND, own.space), moved.kinds)

    def moved(self, old: str) -> Iterator[MovedItems]:
        """The items of `old` as they are, then in each version that forward edges lead to, fewest steps first."""
        own = self.embeddings[old]
        waiting, seen = [MovedItems(old, TransformedItems(own.items_ND, own.side_NS))], {old}
        for moved in waiting:  # grows while it is walked: breadth first
            yield moved
            stored = moved.items
            if self.embeddings[moved.version].version.card.side_dim and stored.side_NS is None:
                continue  # the next edge would need side-information that no edge has given
            for new in self.embeddings:
                edge = self.graph.forward(moved.version, new)
                if edge is not None and new not in seen:
                    transformed = self.forwards[new, moved.version].transform_items(stored.vectors_ND, stored.side_NS)
                    waiting.append(MovedItems(new, transformed, (*moved.kinds, edge.kind.value)))
                    seen.add(new)

    def uncertainty(self, new: str, old: str) -> Vectors | None:
        """(N,) uncertainty of each item on its way from `old` to `new`; None where there is no measure of it.

        The forward edge may give a variance (FastFill); in hyperbolic space the norm is used (HBCT).
        """
        moved = self._moved_to(new, old)
        if moved is not None and moved.items.variance_N is not None:
            return moved.items.variance_N
        space = self.embeddings[old].space
        if not isinstance(space, Lorentz):
            return None
        return hyperbolic_uncertainty(space.curvature, self.embeddings[old].items_ND).astype(np.float32)

    def _moved_to(self, new: str, old: str) -> MovedItems | None:
        return next((moved for moved in self.moved(old) if moved.version == new and moved.kinds), None)

    def _follow(self, route: Route) -> Vectors:
        queries = {name: embeddings.queries_QD for name, embeddings in self.embeddings.items()}
        return follow(route, lambda edge: self.queries[edge.key], queries)


def oldest_first(versions: Mapping[str, Version]) -> list[str]:
    """The names in an order in which every version comes after those that its edges lead to.

    Raises:
        InvalidArgument: edges form a cycle.
    """
    leads = {name: [e.old for e in v.edges if e.old in versions] for name, v in versions.items()}
    try:
        return list(TopologicalSorter(leads).static_order())
    except CycleError as error:
        raise InvalidArgument(f"the edges of {', '.join(error.args[1])} form a cycle") from error
