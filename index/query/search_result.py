"""The result of a search: the ranked list, and its trace. Shape suffixes: Q queries, K results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.edges.calibration import Calibration
from index.edges.graph import Route
from index.engines.base import Keys, Scanned
from index.engines.merge_parts import Floats
from index.metadata.metadata import Item
from index.query.merge import Mode
from index.space import Vectors


@dataclass(frozen=True)
class Degraded:
    """Items that could not be searched: their version, their number, and the reason."""

    version: str
    items: int
    reason: str


class Missing(NamedTuple):
    """An item without a searchable vector: its version, the reason, and the feed number of its last write."""

    version: str
    reason: str
    seq: int


class ShardTrace(NamedTuple):
    """Trace of a search in one shard.

    `calibration` is the map of its scores, None unless the mode is `calibrated`. Shards with the same route share its
    transform; each states the seconds of that.
    """

    version: str
    origin: str
    items: int
    route: Route
    calibration: Calibration | None
    transform_seconds: float
    scan_seconds: float
    scanned: Scanned


class SearchResult(NamedTuple):
    """The answer to Q queries.

    Attributes:
        version: the version of the queries.
        mode: how the shards were merged.
        scores_QK: the scores of the ranking, best first: probabilities, raw or fused scores, by the mode.
        raw_QK: the scores in the spaces of the items' versions.
        keys_QK: the keys of the items, -1 after the last match.
        shards_QK: the index in `shards` of each match, -1 after the last one.
        shards: the shards that were searched.
        items: key -> item, of all matches.
        seq: the change feed number of the view.
        items_by_version: number of items each version serves.
        degraded: the items that could not be searched.
        encode_seconds: version -> seconds of embedding the queries by it.
        filter_seconds: seconds of the filter.
        merge_seconds: seconds of calibrating and merging.
    """

    version: str
    mode: Mode
    scores_QK: Floats | Vectors
    raw_QK: Vectors
    keys_QK: Keys
    shards_QK: NDArray[np.int64]
    shards: tuple[ShardTrace, ...]
    items: Mapping[int, Item]
    seq: int
    items_by_version: Mapping[str, int]
    degraded: tuple[Degraded, ...]
    encode_seconds: Mapping[str, float]
    filter_seconds: float
    merge_seconds: float
