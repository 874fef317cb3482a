"""QUERY PATH over HTTP: read the queries, then in a thread encode, search and show what was found."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from index.attempts import attempts
from index.merge import Mode
from index.query_plan import Ask
from index.search_params import SearchParams
from index.search_result import SearchResult, ShardTrace
from index.space import space_from_json
from index.text import MAX_CHARACTERS
from regraft.models import (
    DegradedShard,
    EdgeUsed,
    Explanation,
    ImageWarning,
    Match,
    QueryMatches,
    ScannedItems,
    SearchedShard,
    SearchResponse,
    SearchSeconds,
    ShardSeconds,
)
from service.http.body_schemas import EMBEDDING, FILE, fields, many, reads
from service.http.forms import FORM, JSON, media_type, read_form
from service.http.requests import CheckedRoute, Service, read_body
from service.http.search_request import KINDS, LISTS, OPTIONS, QueryBatch, SearchRequest, from_form, from_json
from service.replica.replica import LoadedGallery
from service.runtime import Runtime
from service.schemas import ID, NAME, Name
from service.upgrades.rollouts.monitor import Asking

router = APIRouter(route_class=CheckedRoute, tags=["query"])

QUERY_KEY = "X-Query-Key"
"""Header: queries of one key stay with one version during a canary."""
MAX_FIELD_BYTES = 1 << 20

ReadRequest = Callable[[LoadedGallery], SearchRequest]
"""Reads a request as the gallery stands now."""

OPTION_SCHEMAS: dict[str, Any] = SearchParams.model_json_schema()["properties"]
OPTION_SCHEMAS["filter"] |= {"anyOf": [{"$ref": "#/components/schemas/Filter"}, {"type": "null"}]}
QUERY_SCHEMAS: dict[str, Any] = {
    "texts": many({"type": "string", "minLength": 1, "maxLength": MAX_CHARACTERS}),
    "items": many(ID, description="ids of stored items: more like these"),
}
QUERY_BODY = reads(
    form=fields({"images": many(FILE), **QUERY_SCHEMAS, **OPTION_SCHEMAS}, required=("images",)),
    json=fields(
        {
            "version": {**NAME, "description": "which version made the embeddings"},
            "embeddings": many(EMBEDDING),
            **QUERY_SCHEMAS,
            **OPTION_SCHEMAS,
        },
        anyOf=[{"required": ["embeddings", "version"]}, {"required": ["texts"]}, {"required": ["items"]}],
        dependentRequired={"version": ["embeddings"], "embeddings": ["version"]},
    ),
)


@router.post("/galleries/{name}/query", response_model=SearchResponse, openapi_extra=QUERY_BODY)
async def query(name: Name, request: Request, service: Service) -> Response:
    """The k best items for each query, over every version the gallery holds; `strict` refuses a degraded answer."""
    key = request.headers.get(QUERY_KEY)
    if media_type(request, JSON, FORM) == JSON:
        raw = await read_body(request, service.settings.max_json_bytes)
        return await service.in_thread(respond, service, name, lambda live: from_json(service, live, raw), key)
    async with read_form(
        request,
        files="images",
        fields={*OPTIONS, *LISTS},
        max_files=service.settings.max_batch,
        max_field_bytes=MAX_FIELD_BYTES,
    ) as form:
        return await service.in_thread(respond, service, name, lambda live: from_form(service, live, form), key)


def respond(service: Runtime, name: str, read: ReadRequest, key: str | None) -> Response:
    """Parse, encode, search, show; queries of one `key` stay with one version during a canary.

    The response is written on this thread: a large one would keep the event loop from other requests.

    Raises:
        UnknownGallery: there is no such gallery.
        InvalidArgument: an option is out of range, or the response would be too large.
        NoRoute: strict, and some items cannot be reached; or none can.
        ModeUnavailable: the items cannot be ranked together in the mode asked for.
    """
    started = time.perf_counter()
    for attempt in attempts():
        with attempt:
            live = service.replica.find(name)
            if attempt.again:
                service.replica.refresh(live.id)
            service.replica.declare(live)
            asked = read(live)
            answers = service.rollouts.answer(live, [_asking(asked, part, key) for part in asked.parts])
    pages = [_page(service, asked, *one) for one in zip(asked.parts, answers, strict=True)]
    response = _response(asked, pages, round((time.perf_counter() - started) * 1000, 3))
    return Response(response.model_dump_json(exclude_unset=True), media_type="application/json")


def _asking(asked: SearchRequest, part: QueryBatch, key: str | None) -> Asking:
    # One more tells whether there is a next page, and a stored item finds itself among the best.
    depth = asked.end + 1 + (max(part.exclude_keys) >= 0)
    ask = Ask(part.encode, depth, asked.params, part.encoders, part.stored)
    return Asking(part.version, ask, part.content, key, asked.params.k)


@dataclass(frozen=True)
class Page:
    """What one part of a request gets: `results` in its order, and whether any query has `more` behind them."""

    part: QueryBatch
    answer: SearchResult
    results: list[QueryMatches]
    more: bool
    fetch_seconds: float


def _page(service: Runtime, asked: SearchRequest, part: QueryBatch, answer: SearchResult) -> Page:
    """One part's page of what was found."""
    started = time.perf_counter()
    rows = [list(row) for row in _ranked(service, answer, part, asked.params.threshold)]
    shown = [row[asked.offset : asked.end] for row in rows]
    results = _show(answer, part, shown)
    service.traffic.count(np.asarray([key for row in shown for _, _, key, _ in row], np.int64))
    return Page(part, answer, results, any(len(row) > asked.end for row in rows), time.perf_counter() - started)


def _response(asked: SearchRequest, pages: Sequence[Page], took_ms: float) -> SearchResponse:
    first = pages[0].answer
    degraded = {(d.version, d.reason): d for page in pages for d in page.answer.degraded}.values()
    return SearchResponse(
        version=first.version,
        k=asked.params.k,
        mode=first.mode.value,
        seq=first.seq,
        mix=dict(first.items_by_version),
        degraded=[DegradedShard(**vars(one)) for one in degraded],
        warnings=[ImageWarning(**warning) for part in asked.parts for warning in part.sight.as_json()],
        results=sorted((result for page in pages for result in page.results), key=_place),
        next=asked.cursor() if any(page.more for page in pages) else None,
        **({"explain": explain(pages)} if asked.params.explain else {}),
        took_ms=took_ms,
    )


def _place(result: QueryMatches) -> tuple[int, int]:
    """Where its query stands in the request."""
    _, kind, number = result.query.split("/")
    return KINDS.index(kind), int(number)


def _ranked(
    service: Runtime, found: SearchResult, part: QueryBatch, threshold: float | None
) -> Iterator[Iterator[RankedMatch]]:
    """For each query the places in its row that hold a match, best first."""
    sign = 1 if found.mode is not Mode.RAW or _higher_is_better(service, found.shards) else -1
    least = -np.inf if threshold is None else sign * threshold
    arrays = (found.scores_QK, found.raw_QK, found.keys_QK, found.shards_QK)
    for own, *row in zip(part.exclude_keys, *(array_QK.tolist() for array_QK in arrays), strict=True):
        yield (
            place for place in zip(*row, strict=True) if place[3] >= 0 and place[2] != own and sign * place[0] >= least
        )


RankedMatch = tuple[float, float, int, int]
"""Score, raw score, key and shard of a match."""


def _higher_is_better(service: Runtime, shards: Sequence[ShardTrace]) -> bool:
    return all(space_from_json(service.registry.named(s.version).card.space).higher_is_better for s in shards)


def _show(answer: SearchResult, part: QueryBatch, rows: Sequence[Sequence[RankedMatch]]) -> list[QueryMatches]:
    """What the matches show."""
    shards = [{"version": s.version, "origin": s.origin, "route": list(s.route.kinds)} for s in answer.shards]
    results = []
    for pointer, row in zip(part.pointers, rows, strict=True):
        matches = []
        for score, raw_score, key, shard in row:
            item = answer.items[key]
            metadata = json.loads(item.metadata)
            matches.append(Match(id=item.id, score=score, raw_score=raw_score, **shards[shard], metadata=metadata))
        results.append(QueryMatches(query=pointer, version=answer.version, mode=answer.mode.value, matches=matches))
    return results


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
