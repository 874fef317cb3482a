"""Ask every shard of a plan, and gather one ranked list.

Of several shards each is expected to give its share of the list, and searched as thoroughly as that takes. Where it
gave more it is asked once more, for all of the list: so recall holds also where what a query looks for lies together in
one version. Shape suffixes: Q queries, K results wanted, D dimension, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np

from index.engines.base import MISSING, Hits, Shard, nothing
from index.engines.remote import EngineUnavailable
from index.engines.remote_answers import Answers, Unanswered
from index.engines.remote_shard import RemoteShard
from index.merge import Merged
from index.query_plan import Plan
from index.scan import Mask
from index.search_result import Degraded, ShardTrace
from index.space import Vectors


class Moved(NamedTuple):
    """Version -> the queries at the end of their route to it (Q, D), and the seconds that took."""

    vectors: Mapping[str, Vectors]
    seconds: Mapping[str, float]


class ShardQuery(NamedTuple):
    """Q queries, and how shards are asked for the k best of each.

    Attributes:
        allowed_S, exact, recall: as in `Shard.search`.
        degraded: what is left out.
        strict: nothing more may be.
        filter_seconds: what seeing which items pass took.
    """

    plan: Plan
    moved: Moved
    queries: int
    k: int
    allowed_S: Mask | None
    exact: bool
    degraded: tuple[Degraded, ...] = ()
    filter_seconds: float = 0.0
    strict: bool = True
    recall: float | None = None


class Gathered(NamedTuple):
    """One list over all shards, what each of them did, the seconds that merging took, and which gave nothing."""

    merged: Merged
    shards: tuple[ShardTrace, ...]
    merge_seconds: float
    degraded: tuple[Degraded, ...] = ()


def scatter(query: ShardQuery, answers: Answers | None = None) -> Gathered:
    """The k best of all shards; `answers`: what engines have answered to the request.

    Raises:
        Unanswered: engines are to be asked first.
        EngineUnavailable: strict, and one of them gave no answer; or none did.
    """
    plan, moved = query.plan, query.moved
    if not plan.alone:
        return _of_several(query, answers or Answers())
    (((version, origin), shard),) = plan.shards.items()
    started = perf_counter()
    hits = shard.search(moved.vectors[version], query.k, query.allowed_S, exact=query.exact, recall=query.recall)
    found = perf_counter()
    merged = plan.merge([hits[:2]], query.queries, query.k)
    size, used, took = plan.sizes[0], plan.maps[0], moved.seconds[version]
    trace = ShardTrace(version, origin, size, plan.routes[version], used, took, found - started, hits.how)
    return Gathered(merged, (trace,), perf_counter() - found)


def _of_several(query: ShardQuery, answers: Answers) -> Gathered:
    """The same of any shards but one in memory, which gives the whole list and needs no second look."""
    plan, moved, queries, k, allowed_S, *_ = query
    exact, recall = query.exact, query.recall
    found, seconds = [], []
    degraded: list[Degraded] = []
    searches = _asking(plan, answers) if plan.elsewhere else [shard.search for shard in plan.shards.values()]
    for (version, _), search, size, part in zip(plan.shards, searches, plan.sizes, plan.parts, strict=True):
        started = perf_counter()
        try:
            found.append(search(moved.vectors[version], k, allowed_S, exact=exact, recall=recall, part=part))
        except Unanswered:  # the others may have something to ask, too
            continue
        except EngineUnavailable as error:
            degraded.append(Degraded(version, size, error.message))
            if query.strict or len(degraded) == len(plan.shards):
                raise
            found.append(nothing(queries, k))
        seconds.append(perf_counter() - started)
    answers.check()
    if plan.elsewhere:
        seconds = [took + _waited(shard, answers) for shard, took in zip(plan.shards.values(), seconds, strict=True)]
    started = perf_counter()
    merged = plan.merge([hits[:2] for hits in found], queries, k)
    merge_seconds = perf_counter() - started
    unsure = _unsure(merged, [hits.sure for hits in found], k)
    if any(unsure):
        for number, ((version, _), search) in enumerate(zip(plan.shards, searches, strict=True)):
            if rows := unsure[number]:
                started = perf_counter()
                whole = search(moved.vectors[version][rows], k, allowed_S, exact=exact, recall=recall)
                found[number] = _with(found[number], rows, whole)
                seconds[number] += perf_counter() - started
        merged = plan.merge([hits[:2] for hits in found], queries, k)
    traces = tuple(
        ShardTrace(*place, size, plan.routes[place[0]], used, moved.seconds[place[0]], took, hits.how)
        for place, size, used, took, hits in zip(plan.shards, plan.sizes, plan.maps, seconds, found, strict=True)
    )
    return Gathered(merged, traces, merge_seconds, tuple(degraded))


def _asking(plan: Plan, answers: Answers) -> list[Callable[..., Hits]]:
    """How each shard is searched by what engines have answered."""
    return [
        partial(shard.search, answers=answers) if isinstance(shard, RemoteShard) else shard.search
        for shard in plan.shards.values()
    ]


def _waited(shard: Shard, answers: Answers) -> float:
    """The seconds that its engine took."""
    return answers.seconds[shard.there] if isinstance(shard, RemoteShard) else 0.0


def _unsure(merged: Merged, sure: Sequence[int], k: int) -> list[list[int]]:
    """For each shard the queries whose lists have more of it than it was searched for, or are not full."""
    given = merged.shards_QK.tolist()  # lists are short, and NumPy's calls cost more than to count
    return [
        [query for query, row in enumerate(given) if most < k and (row.count(shard) > most or row[-1] < 0)]
        for shard, most in enumerate(sure)
    ]


def _with(hits: Hits, rows: list[int], whole: Hits) -> Hits:
    """What was found, for some of the queries by a search for the whole list."""
    more = whole.scores_QK.shape[1] - hits.scores_QK.shape[1]
    scores_QK = np.pad(hits.scores_QK, ((0, 0), (0, more)))
    slots_QK = np.pad(hits.slots_QK, ((0, 0), (0, more)), constant_values=MISSING)
    scores_QK[rows], slots_QK[rows] = whole.scores_QK, whole.slots_QK
    how = replace(hits.how, effort=max(hits.how.effort, whole.how.effort))
    return Hits(scores_QK, slots_QK, how, hits.sure)
