"""The answer to a search, written by one codec straight from what was found.

`regraft.models.SearchResponse` says what is in it; a test holds both equal.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from index.merge import Mode
from index.projection import Projection
from index.search_result import SearchResult, ShardTrace
from regraft.models import (
    EdgeUsed,
    Explanation,
    ScannedItems,
    SearchedShard,
    SearchSeconds,
    ShardSeconds,
)
from service.http.item_texts import add_texts, too_long
from service.http.search_request import KINDS, QueryBatch, SearchRequest
from service.runtime import Runtime

RankedMatch = tuple[float, float, int, int]
"""Score, raw score, key and shard of a match."""


class Page(NamedTuple):
    """What one part of a request gets: `results` in its order, and of each whether there are `more` behind them."""

    part: QueryBatch
    answer: SearchResult
    results: list[dict[str, Any]]
    more: Sequence[bool]
    fetch_seconds: float


def page_of(service: Runtime, asked: SearchRequest, part: QueryBatch, answer: SearchResult) -> Page:
    """One part's page of what was found."""
    started = time.perf_counter()
    rows = _ranked(service, answer, part, asked.params.threshold)
    end = asked.end
    shown = [row[asked.offset : end] for row in rows]
    results = _show(answer, part, shown, asked.params.fields, service.settings.max_body_bytes)
    if asked.params.with_text:
        add_texts(service, ((place[2] for place in row) for row in shown), (one["matches"] for one in results))
    service.traffic.count([place[2] for row in shown for place in row])
    return Page(part, answer, results, [len(row) > end for row in rows], time.perf_counter() - started)


def answer_of(asked: SearchRequest, pages: Sequence[Page], seconds: float) -> dict[str, Any]:
    """The answer, which took so many seconds; `orjson` writes it."""
    first = pages[0].answer
    results = [result for page in pages for result in page.results]
    return {
        "version": first.version,
        "k": asked.params.k,
        "mode": first.mode.value,
        "seq": first.seq,
        "mix": dict(first.items_by_version),
        "degraded": _degraded(pages),
        "warnings": [warning for part in asked.parts if part.sight for warning in part.sight.as_json()],
        "results": results if len(pages) == 1 else sorted(results, key=_place),
        "next": asked.cursor() if any(True in page.more for page in pages) else None,
        **({"explain": explain(pages).model_dump(mode="json")} if asked.params.explain else {}),
        "took_ms": round(seconds * 1000, 3),
    }


def _degraded(pages: Sequence[Page]) -> list[dict[str, Any]]:
    """By version and reason the items left out: of all shards of a version, in the part that lacks most of them."""
    if not any(page.answer.degraded for page in pages):
        return []
    most: Counter[tuple[str, str]] = Counter()
    for page in pages:
        lacking: Counter[tuple[str, str]] = Counter()
        for one in page.answer.degraded:
            lacking[one.version, one.reason] += one.items
        most |= lacking
    return [{"version": version, "items": items, "reason": reason} for (version, reason), items in most.items()]


def _place(result: dict[str, Any]) -> tuple[int, int]:
    """Where its query stands in the request."""
    _, kind, number = result["query"].split("/")
    return KINDS.index(kind), int(number)


def _ranked(
    service: Runtime, found: SearchResult, part: QueryBatch, threshold: float | None
) -> list[list[RankedMatch]]:
    """For each query the places in its row that hold a match, best first."""
    sign = 1 if threshold is None or found.mode is not Mode.RAW or _higher_is_better(service, found.shards) else -1
    least = -math.inf if threshold is None else sign * threshold
    arrays = (found.scores_QK, found.raw_QK, found.keys_QK, found.shards_QK)
    return [
        [place for place in zip(*row, strict=True) if place[3] >= 0 and place[2] != own and sign * place[0] >= least]
        for own, *row in zip(part.exclude_keys, *(array_QK.tolist() for array_QK in arrays), strict=True)
    ]


def _higher_is_better(service: Runtime, shards: Sequence[ShardTrace]) -> bool:
    return all(service.registry.named(s.version).space.higher_is_better for s in shards)


def _show(
    answer: SearchResult,
    part: QueryBatch,
    rows: Sequence[Sequence[RankedMatch]],
    fields: Projection | None,
    most: int,
) -> list[dict[str, Any]]:
    """What the matches show. Raises InvalidArgument where their metadata are longer than `most` together."""
    shards = [(s.version, s.origin, s.route.kinds) for s in answer.shards]
    version, mode, known = answer.version, answer.mode.value, answer.items
    results, length = [], 0
    for pointer, row in zip(part.pointers, rows, strict=True):
        matches = []
        for score, raw_score, key, shard in row:
            stored, name, _ = known[key]
            made_by, origin, route = shards[shard]
            metadata = stored if fields is None else _some(stored, fields)
            if (length := length + len(metadata)) > most:
                raise too_long("metadata", most, "fewer of their `fields`")
            matches.append(
                {
                    "id": name,
                    "score": score,
                    "raw_score": raw_score,
                    "version": made_by,
                    "origin": origin,
                    "route": route,
                    "metadata": orjson.Fragment(metadata),
                }
            )
        results.append({"query": pointer, "version": version, "mode": mode, "matches": matches})
    return results


def _some(stored: str, fields: Projection) -> str:
    """Some fields of a JSON object; as text, since it may hold integers that orjson would not write."""
    return json.dumps(fields.of(stored))


def explain(pages: Sequence[Page]) -> Explanation:
    """How an answer came about: for each shard its route, evidence, calibration and times, and where time went."""
    encode: Counter[str] = Counter()
    for page in pages:
        encode.update(page.answer.encode_seconds)
    shards = [_shard(page.part.pointers, shard) for page in pages for shard in page.answer.shards]
    seconds = SearchSeconds(
        encode=dict(encode),
        # Shards of one version share one transform.
        transform=sum(
            seconds
            for page in pages
            for seconds in {s.version: s.transform_seconds for s in page.answer.shards}.values()
        ),
        filter=sum(page.answer.filter_seconds for page in pages),
        scan=sum(shard.scan_seconds for page in pages for shard in page.answer.shards),
        merge=sum(page.answer.merge_seconds for page in pages),
        fetch=sum(page.fetch_seconds for page in pages),
    )
    return Explanation(shards=shards, seconds=seconds)


def _shard(queries: Sequence[str], shard: ShardTrace) -> SearchedShard:
    return SearchedShard(
        queries=list(queries),
        version=shard.version,
        origin=shard.origin,
        items=shard.items,
        route=[
            EdgeUsed(new=e.new, old=e.old, kind=e.kind.value, scores={n: vars(s) for n, s in e.scores.items()})
            for e in shard.route.edges
        ],
        encoders=list(shard.route.encoders),
        calibration=shard.calibration.as_json() if shard.calibration else None,
        seconds=ShardSeconds(transform=shard.transform_seconds, scan=shard.scan_seconds),
        scanned=ScannedItems(**vars(shard.scanned)),
    )
