"""How a gallery answers the queries of one `Ask`: which shards it scans, along which routes, and how it merges.

Shape suffixes: Q queries, K results, D dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from index.calibration import Calibration
from index.engines.base import Keys, Shard
from index.graph import Route
from index.merge import Merged, Mode, merge_calibrated, merge_rank, merge_raw, no_matches
from index.scan import Mask
from index.search_params import DEFAULTS, SearchParams
from index.search_result import Degraded
from index.space import Space, Vectors

Encode = Callable[[str], Vectors]
"""Version name -> this request's queries embedded by that version, (Q, D)."""

ShardKey = tuple[str, str]
"""(version, origin)."""


@dataclass(frozen=True)
class Ask:
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
    stored: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EmbeddedQueries:
    """The queries of one `Ask`: version -> their embeddings (Q, D), and how long it took."""

    vectors: dict[str, Vectors] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How one `Ask` is answered, as the gallery stands now.

    Attributes:
        query_version: what asks.
        items_by_version: how many items lie in each.
        routes: version -> how it is reached.
        degraded: what is not.
        live: the shards to scan.
        spaces: the space of each of them.
        mode: how they are merged.
        maps: the score map of each of them; None where there is no complete set.
        moved: version -> the queries in its space, and how long moving them took.
        depth: results a query.
        allowed: the items that pass the filter; None: all.
        filter_seconds: how long it took to see that.
    """

    query_version: str
    items_by_version: Mapping[str, int]
    routes: Mapping[str, Route]
    degraded: tuple[Degraded, ...]
    live: Mapping[ShardKey, Shard]
    spaces: Sequence[Space]
    mode: Mode
    maps: Sequence[Calibration] | None
    moved: Mapping[str, tuple[Vectors, float]]
    depth: int
    allowed: Mask | None
    filter_seconds: float

    def merge(self, scanned: Sequence[tuple[Vectors, Keys]], sizes: Sequence[int], queries: int) -> Merged:
        """One ranking of what each shard of a size found."""
        if not scanned:
            return no_matches(queries)
        if self.mode is Mode.CALIBRATED:
            return merge_calibrated(scanned, self.maps or (), self.depth)
        if self.mode is Mode.RAW:
            return merge_raw(scanned, [space.higher_is_better for space in self.spaces], self.depth)
        return merge_rank(scanned, sizes, self.depth)
