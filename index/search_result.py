"""What a search answers with: the ranked list, and what explains it. Shape suffixes: Q queries, K results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.calibration import Calibration
from index.engines.base import Keys, Scanned
from index.engines.joined import Floats
from index.graph import Route
from index.merge import Mode
from index.metadata import Item
from index.space import Vectors


@dataclass(frozen=True)
class Degraded:
    """Items that could not be asked: their version, how many they are, and why."""

    version: str
    items: int
    reason: str


class Missing(NamedTuple):
    """An item without a vector that can be searched: its version, why, and the feed number of its last write."""

    version: str
    reason: str
    seq: int


class ShardTrace(NamedTuple):
    """One live shard as a search saw it.

    `calibration` is the map its scores went through, None unless the mode is `calibrated`. Of several shards behind
    one route each names the seconds of the one transform.
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
        version: what asked.
        mode: how the shards were merged.
        scores_QK: what the list is ranked by, best first: a probability, a raw score or a fused one, by the mode.
        raw_QK: the scores in the spaces of the items' versions.
        keys_QK: the items, -1 where there are no more.
        shards_QK: which of `shards` each came from, -1 likewise.
        shards: the live shards that were asked.
        items: what the results are, by key.
        seq: the number in the change feed that all of this was true at.
        items_by_version: how many items lie in each.
        degraded: what could not be asked.
        encode_seconds: version -> how long it took to embed the queries by it.
        filter_seconds: how long it took to see which items pass the filter.
        merge_seconds: how long calibrating and merging took.
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
