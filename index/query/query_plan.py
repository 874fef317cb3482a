"""A query to a gallery (`GalleryQuery`) and its `Plan`: which shards are scanned, along which routes, how merged.

Shape suffixes: Q queries, K results, D dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from index.edges.calibration import Calibration
from index.edges.graph import Route
from index.engines.base import Hits, Shard
from index.engines.merge_parts import Merged
from index.query.merge import Mode, merge_calibrated, merge_rank, merge_raw
from index.query.search_params import DEFAULTS, SearchParams
from index.query.search_result import Degraded
from index.space import Space, Vectors

Encode = Callable[[str], Vectors]
"""Version name -> the queries of this request embedded by that version (Q, D)."""


class GalleryQuery(NamedTuple):
    """A batch of queries with common options.

    Attributes:
        encode: embeds the queries by a version.
        depth: results per query, at least 1: `params.k` plus what pages before and after need. With a filter there may
            be fewer results.
        params: the options; `mode` None: the mode measured to be best, else that of `edge_maps`.
        encoders: versions that can embed the queries besides the query version (for `slerp` and `dual` routes).
        stored: of queries that are items of the gallery, key -> the feed number of the write that was read.
    """

    encode: Encode
    depth: int
    params: SearchParams = DEFAULTS
    encoders: frozenset[str] = frozenset()
    stored: Mapping[int, int] = MappingProxyType({})


class EmbeddedQueries(NamedTuple):
    """The queries of one `GalleryQuery`: version -> their embeddings (Q, D); version -> the seconds to embed them."""

    vectors: dict[str, Vectors]
    seconds: dict[str, float]


class PlannedShard(NamedTuple):
    """A shard to scan.

    Attributes:
        version, origin: its key.
        shard: the shard.
        items: number of items it serves.
        share: `items` as a share of all items that the plan scans.
        route: how queries reach it.
        calibration: its score map; None unless the mode is `calibrated`.
    """

    version: str
    origin: str
    shard: Shard
    items: int
    share: float
    route: Route
    calibration: Calibration | None


@dataclass(frozen=True)
class Plan:
    """How queries of one version are answered until the gallery changes.

    Attributes:
        encoders: the versions that must embed the queries.
        degraded: the items that cannot be searched.
        shards: the shards to scan.
        spaces: the space of each shard.
        mode: how the results are merged.
    """

    encoders: frozenset[str]
    degraded: tuple[Degraded, ...]
    shards: Sequence[PlannedShard]
    spaces: Sequence[Space]
    mode: Mode

    def merge(self, found: Sequence[Hits], k: int) -> Merged:
        """Merge the results of the shards into the k best per query."""
        if self.mode is Mode.CALIBRATED:
            return merge_calibrated(found, self._maps, k)
        if self.mode is Mode.RAW:
            return merge_raw(found, self._orders, k)
        return merge_rank(found, [one.items for one in self.shards], k)

    @cached_property
    def transformed_routes(self) -> Mapping[str, Route]:
        """Version -> its route, for routes that transform queries."""
        routes = {one.version: one.route for one in self.shards}
        return {version: route for version, route in routes.items() if route.edges and not route.dual}

    @cached_property
    def is_remote(self) -> bool:
        """Whether a shard may query a remote engine."""
        return any(one.shard.is_remote for one in self.shards)

    @cached_property
    def _maps(self) -> Sequence[Calibration]:
        return [one.calibration for one in self.shards if one.calibration]

    @cached_property
    def _orders(self) -> Sequence[bool]:
        return [space.higher_is_better for space in self.spaces]
