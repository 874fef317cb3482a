"""Search every shard of a plan and merge the results into one ranked list (`scatter`).

Each of several shards is first searched for its expected share of the list only, see `index.engines.merge_parts`. Shape
suffixes: Q queries, K results wanted, D dimension, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import NamedTuple

from index.engines.base import Hits, Shard, no_hits
from index.engines.merge_parts import Merged, parts_to_repeat, replace_rows
from index.engines.remote.answers import Answers, Unanswered
from index.engines.remote.base import EngineUnavailable
from index.engines.remote.shard import RemoteShard
from index.query.merge import no_matches
from index.query.query_plan import Plan
from index.query.search_result import Degraded, ShardTrace
from index.scan import Mask
from index.space import Vectors


class ShardQuery(NamedTuple):
    """Queries and options for searching the `k` best items of each in all shards.

    Attributes:
        vectors: version -> the queries transformed along the route to it (Q, D).
        allowed_S, exact, recall: as in `Shard.search`.
        strict: fail if any shard cannot be searched.
        transform_seconds: version -> seconds of the transforms on its route; absent without transforms.
        filter_seconds: seconds of the filter.
    """

    plan: Plan
    vectors: Mapping[str, Vectors]
    k: int
    allowed_S: Mask | None
    exact: bool
    recall: float | None
    strict: bool
    transform_seconds: Mapping[str, float]
    filter_seconds: float


class Gathered(NamedTuple):
    """The merged list, the trace of each shard, the seconds of merging, and the items that could not be searched."""

    merged: Merged
    shards: tuple[ShardTrace, ...]
    merge_seconds: float
    degraded: tuple[Degraded, ...]


def scatter(query: ShardQuery, answers: Answers | None = None) -> Gathered:
    """Search all shards for the k best; `answers`: answers of remote engines to this request so far.

    Raises:
        Unanswered: remote engines must be queried first.
        EngineUnavailable: no shard could be searched; or, if strict, some shard could not.
    """
    plan, vectors, k = query.plan, query.vectors, query.k
    answers = answers or (Answers() if plan.is_remote else None)
    found: list[Hits] = []
    traces: list[ShardTrace] = []
    degraded: list[Degraded] = []
    for version, origin, shard, items, share, route, calibration in plan.shards:
        started = perf_counter()
        try:
            hits = _search_function(query, shard, answers)(vectors[version], share=share)
        except Unanswered:  # collect the requests of the other shards, too
            continue
        except EngineUnavailable as error:
            degraded.append(Degraded(version, items, error.message))
            if query.strict or len(degraded) == len(plan.shards):
                raise
            hits = no_hits(len(vectors[version]), k)
        took = perf_counter() - started + (_engine_seconds(shard, answers) if answers is not None else 0.0)
        moved = query.transform_seconds.get(version, 0.0)
        found.append(hits)
        traces.append(ShardTrace(version, origin, items, route, calibration, moved, took, hits.scanned))
    if answers is not None:
        answers.check()
    started = perf_counter()
    merged = plan.merge(found, k) if found else no_matches(len(next(iter(vectors.values()))))
    merge_seconds = perf_counter() - started
    if len(found) > 1 and any(again := parts_to_repeat(merged, found, k)):
        for number, rows in enumerate(again):
            if rows:
                found[number], traces[number] = _search_whole_list(
                    query, number, rows, found[number], traces[number], answers
                )
        merged = plan.merge(found, k)
    return Gathered(merged, tuple(traces), merge_seconds, tuple(degraded))


def _search_function(query: ShardQuery, shard: Shard, answers: Answers | None) -> Callable[..., Hits]:
    """The search function of a shard; that of a remote shard reads `answers`."""
    search: Callable[..., Hits] = shard.search
    if answers is not None and isinstance(shard, RemoteShard):
        search = partial(shard.search, answers=answers)
    return partial(search, k=query.k, allowed_S=query.allowed_S, exact=query.exact, recall=query.recall)


def _engine_seconds(shard: Shard, answers: Answers) -> float:
    """Seconds that the engine of a remote shard took."""
    return answers.seconds[shard.remote_rows] if isinstance(shard, RemoteShard) else 0.0


def _search_whole_list(
    query: ShardQuery, number: int, rows: list[int], hits: Hits, trace: ShardTrace, answers: Answers | None
) -> tuple[Hits, ShardTrace]:
    """Search one shard again for the queries `rows`, now for the whole list, and replace their hits."""
    started = perf_counter()
    whole = _search_function(query, query.plan.shards[number].shard, answers)(query.vectors[trace.version][rows])
    hits = replace_rows(hits, rows, whole)
    seconds = trace.scan_seconds + perf_counter() - started
    return hits, trace._replace(scan_seconds=seconds, scanned=hits.scanned)
