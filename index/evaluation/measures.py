"""Metrics per query for gates besides CMC and mAP: TAR@FAR, and recall of a reference ranking or of listed items.

Both rank blockwise, as `metrics` does, and leave out each query's own image. Shape suffixes: Q queries, N
items, K results, B one block of queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.errors import InvalidArgument
from index.evaluation.metrics import Bools, Compared, Floats, Ints, blocks, comparable, costs, ordered

FIRST = "cmc@1"
"""Whether the first match is relevant; flips are counted on it."""
MIN_PASSING = 10
"""If fewer pairs of different classes may pass, TAR@FAR hangs on single pairs, which resampled queries cannot show."""


@dataclass(frozen=True)
class PerQuery:
    """Name -> metric (Q,), including `cmc@1`; `valid` (Q,) is False for queries that are skipped.

    `shifts`: name -> (Q,) with mean 0 over valid queries, where a query also acts on the values of the others. The mean
    of `resampled` over a resample of queries is, to first order, the metric of the resample. `decisive`: whether an
    interval can be trusted.
    """

    values: Mapping[str, Floats]
    valid: Bools
    shifts: Mapping[str, Floats] = field(default_factory=dict)
    decisive: bool = True

    def per_query(self, metric: str) -> Floats:
        """The (Q,) values of a metric."""
        if metric not in self.values:
            raise InvalidArgument(f"metric must be one of {', '.join(self.values)}, not {metric!r}", pointer="/metric")
        return self.values[metric]

    def resampled(self, metric: str) -> Floats:
        """The (Q,) values to resample for an interval of the metric."""
        return self.per_query(metric) + self.shifts.get(metric, 0.0)


def first_items(shard: Compared, k: int, remove_self: ArrayLike) -> NDArray[np.int64]:
    """Numbers (Q, K) of the k best items of each query, best first; ties in the order of their numbers.

    Raises:
        InvalidArgument: k is not 1 to the number of items that are not the query itself.
    """
    queries, items = comparable(shard)
    self_Q = np.asarray(remove_self, np.int64)
    most = len(items) - int((self_Q >= 0).any())
    if not 1 <= k <= most:
        raise InvalidArgument(f"k must be 1 to {most}, not {k}", pointer="/k")
    costed = (_cost_block(queries, items, shard, rows, self_Q) for rows in blocks(len(queries), len(items)))
    return np.concatenate([_first(cost_BN, k) for cost_BN in costed])


def recall(found_QK: Ints, truth_QK: Ints) -> PerQuery:
    """recall@k: share of the reference's first k among the first k found; for `cmc@1` these k are relevant."""
    return recall_of(found_QK, truth_QK, truth_QK.shape[1])


def recall_of(found_QK: Ints, relevant_QR: Ints, k: int) -> PerQuery:
    """recall@k: share of a query's relevant items, `relevant_QR` (-1: no item), that are among the first k found."""
    some_Q = (relevant_QR >= 0).sum(axis=1)
    pairs = zip(found_QK[:, :k], relevant_QR, strict=True)
    hit_QK = np.stack([np.isin(found_K, relevant_R[relevant_R >= 0]) for found_K, relevant_R in pairs])
    values = {f"recall@{k}": hit_QK.sum(axis=1) / np.maximum(some_Q, 1), FIRST: hit_QK[:, 0].astype(np.float64)}
    return PerQuery(values, some_Q > 0)


def tar(
    shard: Compared, query_labels: ArrayLike, item_labels: ArrayLike, far: float, remove_self: ArrayLike
) -> PerQuery:
    """TAR@FAR: share of a query's own class above the lowest threshold that at most `far` of all other pairs pass.

    There is one threshold for all queries, from all pairs of different classes. The mean over queries weights all
    queries equally, however many items their classes have. Other queries would give another threshold: `shifts` are how
    far each query moves it, times the slope of TAR over FAR, taken between half and twice `far`.

    Raises:
        InvalidArgument: there is no pair of one class, or none of different classes.
    """
    queries, items = comparable(shard)
    classes, codes = np.unique(np.concatenate([np.asarray(query_labels), np.asarray(item_labels)]), return_inverse=True)
    query_codes, item_codes = codes[: len(queries)], codes[len(queries) :]
    self_Q = np.asarray(remove_self, np.int64)
    same_Q = np.bincount(item_codes, minlength=len(classes))[query_codes] - (self_Q >= 0)
    others = len(queries) * len(items) - int(same_Q.sum()) - int((self_Q >= 0).sum())
    if not others or not same_Q.any():
        raise InvalidArgument("TAR@FAR needs pairs of one label and pairs of different labels", pointer="/metric")

    def costed() -> Iterator[tuple[NDArray[np.float32], Bools]]:
        """Costs and whether the classes are the same, block by block."""
        for rows in blocks(len(queries), len(items)):
            yield _cost_block(queries, items, shard, rows, self_Q), query_codes[rows, None] == item_codes

    passing = int(np.floor(far * others + 1e-9))
    most = max(2 * passing, 1)
    of_others = (cost_BN[~same_BN & np.isfinite(cost_BN)] for cost_BN, same_BN in costed())
    barrier = np.append(_lowest(of_others, most + 1), np.float32(np.inf))
    places = [passing // 2, passing, min(most, len(barrier) - 1)]
    limits = barrier[places]
    accepted, passed, first = [], [], []
    for cost_BN, same_BN in costed():
        accepted.append([(same_BN & (cost_BN < limit)).sum(axis=1) for limit in limits])
        passed.append((~same_BN & (cost_BN < limits[1])).sum(axis=1))
        best_B = cost_BN.min(axis=1)
        # Irrelevant items of equal cost come first.
        first.append(~((cost_BN == best_B[:, None]) & ~same_BN).any(axis=1))
    name, valid_Q = f"TAR@FAR={far:g}", same_Q > 0
    lower_Q, values_Q, higher_Q = np.concatenate(accepted, axis=1) / np.maximum(same_Q, 1)
    # Per pair: a step of `passing` by one changes TAR by so much.
    slope = float((higher_Q - lower_Q)[valid_Q].mean()) / (places[2] - places[0])
    passed_Q, others_Q = np.concatenate(passed), len(items) - same_Q - (self_Q >= 0)
    expected_Q = others_Q * passed_Q[valid_Q].sum() / max(int(others_Q[valid_Q].sum()), 1)
    shifts_Q = np.where(valid_Q, slope * valid_Q.sum() * (expected_Q - passed_Q), 0.0)
    first_Q = np.concatenate(first).astype(np.float64)
    return PerQuery({name: values_Q, FIRST: first_Q}, valid_Q, {name: shifts_Q}, passing >= MIN_PASSING)


def _lowest(blocks_of_costs: Iterable[NDArray[np.float32]], count: int) -> NDArray[np.float32]:
    """The `count` lowest of all costs, or all if there are fewer, lowest first."""
    lowest = np.empty(0, np.float32)
    for cost_P in blocks_of_costs:
        lowest = np.concatenate([lowest, cost_P])
        if len(lowest) > count:
            lowest = np.partition(lowest, count - 1)[:count]
    return np.sort(lowest)


def _first(cost_BN: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The columns (B, K) of the k lowest costs, lowest first, ties in their order."""
    keys_BN = ordered(cost_BN).astype(np.uint64)
    keys_BN <<= np.uint64(32)
    keys_BN |= np.arange(cost_BN.shape[1], dtype=np.uint64)
    first_BK = np.sort(np.partition(keys_BN, k - 1, axis=1)[:, :k], axis=1)
    return (first_BK & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _cost_block(queries: Floats, items: Floats, shard: Compared, rows: slice, self_Q: Ints) -> NDArray[np.float32]:
    cost_BN = costs(queries[rows], items, shard.space)
    own = np.flatnonzero(self_Q[rows] >= 0)
    cost_BN[own, self_Q[rows][own]] = np.inf
    return cost_BN
