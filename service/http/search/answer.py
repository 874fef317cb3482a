"""The answer to a search, built directly from the search result.

Its fields are those of `regraft.models.SearchResponse`, as a test checks.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from index.metadata.projection import Projection
from index.query.merge import Mode
from index.query.search_result import SearchResult, ShardTrace
from regraft.models import (
    EdgeUsed,
    Explanation,
    ScannedItems,
    SearchedShard,
    SearchSeconds,
    ShardSeconds,
)
from service.http.galleries.shown_items import add_texts, too_long
from service.http.search.request import KINDS, QueryBatch, SearchRequest
from service.runtime import Runtime

RankedMatch = tuple[float, float, int, int]
"""Score, raw score, key and shard of a match."""


class Page(NamedTuple):
    """The page of one part of a request: for each query its result, and whether there are `more` matches after it."""

    part: QueryBatch
    answer: SearchResult
    results: list[dict[str, Any]]
    more: Sequence[bool]
    fetch_seconds: float


def page_of(service: Runtime, request: SearchRequest, part: QueryBatch, answer: SearchResult) -> Page:
    """The page of one part of a request."""
    started = time.perf_counter()
    rows = _ranked(service, answer, part, request.params.threshold)
    end = request.end
    shown = [row[request.offset : end] for row in rows]
    results = _show(answer, part, shown, request.params.fields, service.settings.max_body_bytes)
    if request.params.with_text:
        add_texts(service, ((match[2] for match in row) for row in shown), (result["matches"] for result in results))
    service.traffic.count([match[2] for row in shown for match in row])
    return Page(part, answer, results, [len(row) > end for row in rows], time.perf_counter() - started)


def answer_of(request: SearchRequest, pages: Sequence[Page], seconds: float) -> dict[str, Any]:
    """The answer in a form that `orjson` can encode; `seconds`: how long it took."""
    first = pages[0].answer
    results = [result for page in pages for result in page.results]
    return {
        "version": first.version,
        "k": request.params.k,
        "mode": first.mode.value,
        "seq": first.seq,
        "mix": dict(first.items_by_version),
        "degraded": _degraded(pages),
        "warnings": [warning for part in request.parts if part.image_losses for warning in part.image_losses.as_json()],
        "results": results if len(pages) == 1 else sorted(results, key=_position),
        "next": request.cursor() if any(True in page.more for page in pages) else None,
        **({"explain": explain(pages).model_dump(mode="json")} if request.params.explain else {}),
        "took_ms": round(seconds * 1000, 3),
    }


def _degraded(pages: Sequence[Page]) -> list[dict[str, Any]]:
    """The items left out, by version and reason: summed over shards, then the maximum over parts of the request."""
    if not any(page.answer.degraded for page in pages):
        return []
    most: Counter[tuple[str, str]] = Counter()
    for page in pages:
        lacking: Counter[tuple[str, str]] = Counter()
        for left_out in page.answer.degraded:
            lacking[left_out.version, left_out.reason] += left_out.items
        most |= lacking
    return [{"version": version, "items": items, "reason": reason} for (version, reason), items in most.items()]


def _position(result: dict[str, Any]) -> tuple[int, int]:
    """The position of a result's query in the request."""
    _, kind, number = result["query"].split("/")
    return KINDS.index(kind), int(number)


def _ranked(
    service: Runtime, answer: SearchResult, part: QueryBatch, threshold: float | None
) -> list[list[RankedMatch]]:
    """For each query, its matches that pass the threshold, best first."""
    sign = 1 if threshold is None or answer.mode is not Mode.RAW or _higher_is_better(service, answer.shards) else -1
    least = -math.inf if threshold is None else sign * threshold
    arrays = (answer.scores_QK, answer.raw_QK, answer.keys_QK, answer.shards_QK)
    return [
        [
            match
            for match in zip(*row, strict=True)
            if match[3] >= 0 and match[2] != excluded and sign * match[0] >= least
        ]
        for excluded, *row in zip(part.exclude_keys, *(array_QK.tolist() for array_QK in arrays), strict=True)
    ]


def _higher_is_better(service: Runtime, shards: Sequence[ShardTrace]) -> bool:
    return all(service.registry.named(s.version).space.higher_is_better for s in shards)


def _show(
    answer: SearchResult,
    part: QueryBatch,
    rows: Sequence[Sequence[RankedMatch]],
    fields: Projection | None,
    max_bytes: int,
) -> list[dict[str, Any]]:
    """The results with their matches. Raises InvalidArgument if all metadata together exceed `max_bytes`."""
    shards = [(s.version, s.origin, s.route.kinds) for s in answer.shards]
    version, mode, items = answer.version, answer.mode.value, answer.items
    results, length = [], 0
    for pointer, row in zip(part.pointers, rows, strict=True):
        matches = []
        for score, raw_score, key, shard in row:
            stored, name, _ = items[key]
            made_by, origin, route = shards[shard]
            metadata = stored if fields is None else _projected(stored, fields)
            if (length := length + len(metadata)) > max_bytes:
                raise too_long("metadata", max_bytes, "fewer `fields`")
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


def _projected(stored: str, fields: Projection) -> str:
    """A projection of a JSON object; as text, since it may hold integers that orjson would not write."""
    return json.dumps(fields.of(stored))


def explain(pages: Sequence[Page]) -> Explanation:
    """The explanation of an answer: route, scores, calibration and times of each shard, and seconds by phase."""
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
