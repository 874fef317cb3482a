"""The answer to queries, and how it came about."""

from __future__ import annotations

from typing import Any

from regraft.models.base import ApiModel, ScoreInterval
from regraft.models.items import ImageWarning


class Match(ApiModel):
    """An item that was found: `raw_score` is in its version's space, `score` what the list is ranked by.

    `text`: what it is, where `with_text` asked for it; null: no text, or it cannot be read now.
    """

    id: str
    score: float
    raw_score: float
    version: str
    origin: str
    route: list[str]
    metadata: dict[str, Any]
    text: str | None = None


class QueryMatches(ApiModel):
    """The matches of one query, best first: where it stands in the request, what embedded it, how it was ranked."""

    query: str
    version: str
    mode: str
    matches: list[Match]


class DegradedShard(ApiModel):
    """Items that could not be asked."""

    version: str
    items: int
    reason: str


class EdgeUsed(ApiModel):
    """An edge on a route, and what was measured on it."""

    new: str
    old: str
    kind: str
    scores: dict[str, ScoreInterval]


class ShardSeconds(ApiModel):
    """What a shard took; shards of one version share one transform."""

    transform: float
    scan: float


class ScannedItems(ApiModel):
    """How a shard found what it found.

    `exact`: items compared one by one; `approximate`: items that an index answered for, by `effort` (its largest
    `efSearch` or `nprobe`).
    """

    exact: int
    approximate: int
    effort: int


class SearchedShard(ApiModel):
    """One shard that was asked: its route, the versions that embedded the query for it, and the map of its scores."""

    queries: list[str]
    version: str
    origin: str
    items: int
    route: list[EdgeUsed]
    encoders: list[str]
    calibration: dict[str, Any] | None
    seconds: ShardSeconds
    scanned: ScannedItems


class SearchSeconds(ApiModel):
    """Where the time of an answer went; `encode` by version."""

    encode: dict[str, float]
    transform: float
    filter: float
    scan: float
    merge: float
    fetch: float


class Explanation(ApiModel):
    """How an answer came about."""

    shards: list[SearchedShard]
    seconds: SearchSeconds


class SearchResponse(ApiModel):
    """The answer to queries: `version`, `mode` and `mix` (items per version) are those of the first.

    All of it - matches, what they show, `mix`, `degraded` - is as it was at number `seq` of the gallery's change feed.

    `mode` says what `score` is: a probability (`calibrated`), the raw score (`raw`) or a fused rank (`rank`). `next` is
    the cursor of the page behind this one, null at the end.
    """

    version: str
    k: int
    mode: str
    seq: int
    mix: dict[str, int]
    degraded: list[DegradedShard]
    warnings: list[ImageWarning]
    results: list[QueryMatches]
    next: str | None
    explain: Explanation | None = None
    took_ms: float
