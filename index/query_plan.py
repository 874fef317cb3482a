"""What is asked of a gallery, and how it answers: which shards it scans, along which routes, and how it merges.

Shape suffixes: Q queries, K results, D dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from index.calibration import Calibration
from index.engines.base import Keys, Shard
from index.graph import Route
from index.merge import Merged, Mode, merge_calibrated, merge_rank, merge_raw, no_matches
from index.search_params import DEFAULTS, SearchParams
from index.space import Space, Vectors

Encode = Callable[[str], Vectors]
"""Version name -> this request's queries embedded by that version, (Q, D)."""

ShardKey = tuple[str, str]
"""(version, origin)."""


class Ask(NamedTuple):
    """Queries that are embedded alike, and what is asked of them.

    Attributes:
        encode: embeds them by a version.
        depth: results a query, at least 1: `params.k`, and what pages before and behind it need; never more than items.
        params: the options; `mode` None: what was measured to be best, else what `edge_maps` says. With a filter there
            may be fewer results.
        encoders: versions that can embed them besides the one that asks (for `slerp` and `dual` routes).
        stored: of queries that are items of the gallery the key, and the feed number of the write they were read from.
    """

    encode: Encode
    depth: int
    params: SearchParams = DEFAULTS
    encoders: frozenset[str] = frozenset()
    stored: Mapping[int, int] = MappingProxyType({})


class EmbeddedQueries(NamedTuple):
    """The queries of one `Ask`: version -> their embeddings (Q, D), and how long it took."""

    vectors: dict[str, Vectors]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Plan:
    """How queries of one version are answered for as long as a gallery does not change.

    Attributes:
        routes: version -> how it is reached.
        shards: to scan.
        sizes: how many items each of them serves.
        spaces: the space of each.
        mode: how they are merged.
        maps: the score map of each; None unless the mode is `calibrated`.
    """

    routes: Mapping[str, Route]
    shards: Mapping[ShardKey, Shard]
    sizes: Sequence[int]
    spaces: Sequence[Space]
    mode: Mode
    maps: Sequence[Calibration | None]

    def merge(self, scanned: Sequence[tuple[Vectors, Keys]], queries: int, k: int) -> Merged:
        """One ranking of the k best of what each shard found."""
        if not scanned:
            return no_matches(queries)
        if self.mode is Mode.CALIBRATED:
            return merge_calibrated(scanned, [found for found in self.maps if found], k)
        if self.mode is Mode.RAW:
            return merge_raw(scanned, self._orders, k)
        return merge_rank(scanned, self.sizes, k)

    @cached_property
    def moving(self) -> Mapping[str, Route]:
        """The routes along which queries are not compared as they were embedded."""
        return {version: route for version, route in self.routes.items() if route.edges and not route.dual}

    @cached_property
    def still(self) -> Mapping[str, float]:
        """Version -> the seconds that moving queries takes, where nothing moves them."""
        return dict.fromkeys(self.routes, 0.0)

    @cached_property
    def alone(self) -> bool:
        """Whether there is one shard, and it lies in memory."""
        return len(self.shards) == 1 and not self.elsewhere

    @cached_property
    def elsewhere(self) -> bool:
        """Whether a shard may have to ask an engine."""
        return any(shard.elsewhere for shard in self.shards.values())

    @cached_property
    def parts(self) -> Sequence[float]:
        """The share of all items that each of the shards serves."""
        whole = sum(self.sizes)
        return [size / whole for size in self.sizes]

    @cached_property
    def _orders(self) -> Sequence[bool]:
        return [space.higher_is_better for space in self.spaces]
