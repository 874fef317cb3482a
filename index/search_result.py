"""The result of a search: the ranked list, and how it came about. Shape suffixes: Q queries, K results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.calibration import Calibration
from index.engines.base import Keys, Scanned
from index.engines.merge_parts import Floats
from index.graph import Route
from index.merge import Mode
from index.metadata import Item
from index.space import Vectors


@dataclass(frozen=True)
class Degraded:
    """Items that could not be searched: their version, their number, and why."""

    version: str
    items: int
    reason: str


class Missing(NamedTuple):
    """An item without a vector that can be searched: its version, why, and the feed number of its last write."""

    version: str
    reason: str
    seq: int


class ShardTrace(NamedTuple):
    """What a search did in one shard.

    `calibration` is the map its scores went through, None unless the mode is `calibrated`. Shards behind the same
    route each name the seconds of its one transform.
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
        version: of the queries.
        mode: how the shards were merged.
        scores_QK: what the list is ranked by, best first: a probability, a raw score or a fused one, by the mode.
        raw_QK: the scores in the spaces of the items' versions.
        keys_QK: the items, -1 where there are no more.
        shards_QK: the index in `shards` of each match, -1 likewise.
        shards: the shards that were searched.
        items: key -> item, of all matches.
        seq: the change feed number that the answer belongs to.
        items_by_version: number of items each version serves.
        degraded: the items that could not be searched.
        encode_seconds: version -> seconds to embed the queries by it.
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
