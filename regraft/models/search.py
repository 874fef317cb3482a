"""The answer to queries, and its explanation."""

from __future__ import annotations

from typing import Any

from regraft.models.base import ApiModel, ScoreInterval
from regraft.models.items import ImageWarning


class Match(ApiModel):
    """An item that was found: `raw_score` is in its version's space, the list is ranked by `score`.

    `text`: its text, if requested by `with_text`; null: it has none, or it cannot be read.
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
    """The matches of one query, best first; `query`: its place in the request, `version`: by which it was embedded."""

    query: str
    version: str
    mode: str
    matches: list[Match]


class DegradedShard(ApiModel):
    """Items that could not be searched."""

    version: str
    items: int
    reason: str


class EdgeUsed(ApiModel):
    """An edge on a route, and its measured scores."""

    new: str
    old: str
    kind: str
    scores: dict[str, ScoreInterval]


class ShardSeconds(ApiModel):
    """Seconds of a shard; shards of one version share one transform."""

    transform: float
    scan: float


class ScannedItems(ApiModel):
    """How a shard was searched.

    `exact`: items compared exhaustively; `approximate`: items searched by an index with this `effort` (the largest
    `efSearch` or `nprobe`).
    """

    exact: int
    approximate: int
    effort: int


class SearchedShard(ApiModel):
    """One searched shard: its route, the versions that embedded the query for it, and its score map."""

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
    """Seconds of an answer by part; `encode` by version."""

    encode: dict[str, float]
    transform: float
    filter: float
    scan: float
    merge: float
    fetch: float


class Explanation(ApiModel):
    """The trace of an answer."""

    shards: list[SearchedShard]
    seconds: SearchSeconds


class SearchResponse(ApiModel):
    """The answer to queries: `version`, `mode` and `mix` (items per version) are those of the first.

    All parts (matches, their content, `mix`, `degraded`) are consistent at number `seq` of the gallery's change feed.

    `mode` defines `score`: a probability (`calibrated`), the raw score (`raw`) or a fused rank (`rank`). `next` is the
    cursor of the next page, null at the end.
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
