"""Ask every shard of a plan, and gather one ranked list.

Of several shards each is expected to give its share of the list, and searched as thoroughly as that takes. Where it
gave more it is asked once more, for all of the list: so recall holds also where what a query looks for lies together in
one version. Shape suffixes: Q queries, K results wanted, D dimension, S slots.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from index.engines.base import MISSING, Hits, Shard
from index.merge import Merged
from index.query_plan import Plan
from index.scan import Mask, Rows
from index.search_result import ShardTrace
from index.space import Vectors

Moved = Mapping[str, tuple[Vectors, float]]
"""Version -> the queries at the end of their route to it (Q, D), and the seconds that took."""


class _ShardSearch:
    """One shard, and what it found."""

    hits: Hits

    def __init__(self, shard: Shard, queries_QD: Vectors, allowed_S: Mask | None, *, exact: bool) -> None:
        self._shard, self._queries_QD, self._allowed_S, self._exact = shard, queries_QD, allowed_S, exact
        self.seconds = 0.0

    def run(self, k: int, part: float) -> None:
        """The k best, as thoroughly as a part of a list takes."""
        started = time.perf_counter()
        self.hits = self._shard.search(self._queries_QD, k, self._allowed_S, exact=self._exact, part=part)
        self.seconds += time.perf_counter() - started

    def run_again(self, k: int, queries: Rows) -> None:
        """The k best of some of the queries, as thoroughly as a whole list takes."""
        started = time.perf_counter()
        hits = self._shard.search(self._queries_QD[queries], k, self._allowed_S, exact=self._exact)
        self.hits.scores_QK[queries], self.hits.slots_QK[queries] = hits.scores_QK, hits.slots_QK
        how = replace(self.hits.how, effort=max(self.hits.how.effort, hits.how.effort))
        self.hits = self.hits._replace(how=how)
        self.seconds += time.perf_counter() - started


def scatter(
    plan: Plan, moved: Moved, queries: int, k: int, allowed_S: Mask | None, *, exact: bool
) -> tuple[Merged, tuple[ShardTrace, ...], float]:
    """The k best of all shards for Q queries, what each shard did, and the seconds that merging took.

    `allowed_S`, `exact`: as in `Shard.search`.
    """
    searches, whole = [], sum(plan.sizes)
    for ((version, _), shard), size in zip(plan.shards.items(), plan.sizes, strict=True):
        search = _ShardSearch(shard, moved[version][0], allowed_S, exact=exact)
        search.run(k, size / whole)
        searches.append(search)
    started = time.perf_counter()
    merged = plan.merge([search.hits[:2] for search in searches], queries, k)
    merge_seconds = time.perf_counter() - started
    again = [
        (search, _unsure(merged, n, search.hits.sure)) for n, search in enumerate(searches) if search.hits.sure < k
    ]
    if any(len(unsure) for _, unsure in again):
        for search, unsure in again:
            if len(unsure):
                search.run_again(k, unsure)
        merged = plan.merge([search.hits[:2] for search in searches], queries, k)
    traces = tuple(
        ShardTrace(*place, size, plan.routes[place[0]], used, moved[place[0]][1], search.seconds, search.hits.how)
        for place, size, used, search in zip(plan.shards, plan.sizes, plan.maps, searches, strict=True)
    )
    return merged, traces, merge_seconds


def _unsure(merged: Merged, shard: int, sure: int) -> Rows:
    """The queries whose lists have more of a shard than it was searched for, or are not full."""
    given_Q = (merged.shards_QK == shard).sum(axis=1)
    return np.flatnonzero((given_Q > sure) | (merged.keys_QK[:, -1] == MISSING))
