"""Ask every shard of a plan, and gather one ranked list. Shape suffixes: Q queries, D dimension, S slots."""

from __future__ import annotations

import time
from collections.abc import Mapping

from index.merge import Merged
from index.query_plan import Plan
from index.scan import Mask
from index.search_result import ShardTrace
from index.space import Vectors

Moved = Mapping[str, tuple[Vectors, float]]
"""Version -> the queries at the end of their route to it (Q, D), and the seconds that took."""


def scatter(
    plan: Plan, moved: Moved, queries: int, k: int, allowed_S: Mask | None, *, exact: bool
) -> tuple[Merged, tuple[ShardTrace, ...], float]:
    """The k best of all shards for Q queries, what each shard did, and the seconds that merging took.

    `allowed_S`, `exact`: as in `Shard.search`.
    """
    scanned, traces = [], []
    for ((version, origin), shard), size, used in zip(plan.shards.items(), plan.sizes, plan.maps, strict=True):
        queries_QD, transform_seconds = moved[version]
        started = time.perf_counter()
        scores_QK, slots_QK, how = shard.search(queries_QD, k, allowed_S, exact=exact)
        took = time.perf_counter() - started
        scanned.append((scores_QK, slots_QK))
        traces.append(ShardTrace(version, origin, size, plan.routes[version], used, transform_seconds, took, how))
    started = time.perf_counter()
    return plan.merge(scanned, queries, k), tuple(traces), time.perf_counter() - started
