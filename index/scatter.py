"""Ask every shard of a plan, and gather one ranked list.

Of several shards each is expected to give its share of the list, and searched as thoroughly as that takes. Where it
gave more it is asked once more, for all of the list: so recall holds also where what a query looks for lies together in
one version. Shape suffixes: Q queries, K results wanted, D dimension, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
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
from index.scan import Mask, Rows
from index.search_result import Degraded, ShardTrace
from index.space import Vectors


class Moved(NamedTuple):
    """Version -> the queries at the end of their route to it (Q, D), and the seconds that took."""

    vectors: dict[str, Vectors]
    seconds: dict[str, float]


class ShardQuery(NamedTuple):
    """Q queries, and how shards are asked for the k best of each.

    Attributes:
        allowed_S, exact: as in `Shard.search`.
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
    plan, moved, queries, k, allowed_S, exact, *_ = query
    if not plan.alone:
        return _of_several(query, answers or Answers())
    ((place, shard),) = plan.shards.items()
    version, origin = place
    started = perf_counter()
    hits = shard.search(moved.vectors[version], k, allowed_S, exact=exact)
    found = perf_counter()
    merged = plan.merge([(hits.scores_QK, hits.slots_QK)], queries, k)
    size, used, took = plan.sizes[0], plan.maps[0], moved.seconds[version]
    trace = ShardTrace(version, origin, size, plan.routes[version], used, took, found - started, hits.how)
    return Gathered(merged, (trace,), perf_counter() - found)


def _of_several(query: ShardQuery, answers: Answers) -> Gathered:
    """The same of any shards but one in memory, which gives the whole list and needs no second look."""
    plan, moved, queries, k, allowed_S, exact, *_ = query
    found, seconds = [], []
    degraded: list[Degraded] = []
    searches = _asking(plan, answers) if plan.elsewhere else [shard.search for shard in plan.shards.values()]
    for (version, _), search, size, part in zip(plan.shards, searches, plan.sizes, plan.parts, strict=True):
        started = perf_counter()
        try:
            found.append(search(moved.vectors[version], k, allowed_S, exact=exact, part=part))
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
    unsure = {n: _unsure(merged, n, hits.sure) for n, hits in enumerate(found) if hits.sure < k}
    if any(map(len, unsure.values())):
        for number, ((version, _), search, hits) in enumerate(zip(plan.shards, searches, found, strict=True)):
            if len(rows := unsure.get(number, ())):
                started = perf_counter()
                whole_hits = search(moved.vectors[version][rows], k, allowed_S, exact=exact)
                hits.scores_QK[rows], hits.slots_QK[rows] = whole_hits.scores_QK, whole_hits.slots_QK
                how = replace(hits.how, effort=max(hits.how.effort, whole_hits.how.effort))
                found[number] = hits._replace(how=how)
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


def _unsure(merged: Merged, shard: int, sure: int) -> Rows:
    """The queries whose lists have more of a shard than it was searched for, or are not full."""
    given_Q = (merged.shards_QK == shard).sum(axis=1)
    return np.flatnonzero((given_Q > sure) | (merged.keys_QK[:, -1] == MISSING))
