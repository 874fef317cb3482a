"""Backfill curves: a metric while the items of a gallery move from an old version to a new one (`measure_curves`).

At each point, queries reach the unmoved items along their route and the moved items in the new version. Both are ranked
as one list, in the modes of `index.query.merge`: raw, rank, calibrated (`index.edges.calibration`), and label-free, by
the log-odds of `evalue_calibration`, which needs no labels. Each half of the queries is ranked with maps fitted on the
other half, so no query is measured with a map that was fitted on it.
Shape suffixes: Q queries, N items, P points of the curve, B one block of queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from index.edges.calibration import Calibration
from index.evaluation.metrics import Compared, blocks, comparable, costs, leave_out, mean_interval, ranked, scores_of
from index.evaluation.ordering import POINTS, BackfillCurve
from index.evaluation.relevance import Relevance
from index.evaluation.score_maps import fit_evalue_maps, fit_maps
from index.version import Score

RAW, RANK, CALIBRATED, LABEL_FREE = "raw", "rank", "calibrated", "label-free"
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class MeasuredCurve:
    """A measured curve, and the mean of the metric over the whole backfill with its interval over queries."""

    curve: BackfillCurve
    area: Score


def measure_curves(
    before: Compared,
    after: Compared,
    relevance: Relevance,
    orders: Mapping[str, Ints],
    *,
    metric: str = "cmc@1",
    points: int = POINTS,
) -> dict[tuple[str, str], MeasuredCurve]:
    """Measure a backfill in several orders, raw and calibrated; the arguments are those of `curve_values`.

    Returns:
        (order, "raw" or "calibrated") -> curve.
    """
    values = curve_values(before, after, relevance, orders, (RAW, CALIBRATED), metric=metric, points=points)
    return {key: _curve(values_PV) for key, values_PV in values.items()}


def curve_values(
    before: Compared,
    after: Compared,
    relevance: Relevance,
    orders: Mapping[str, Ints],
    modes: Sequence[str],
    *,
    metric: str = "cmc@1",
    points: int = POINTS,
    seed: int = 0,
    fit_on: Ints | None = None,
) -> dict[tuple[str, str], Floats]:
    """The metric of each query during a backfill, in several orders and modes.

    Args:
        before: queries and items before any item has moved.
        after: queries and items after all have moved; items in the same order.
        relevance: the relevant items.
        orders: name -> (N,) positions of items in the order in which they move.
        modes: some of RAW, RANK, CALIBRATED and LABEL_FREE.
        metric: "cmc@<k>" or "mAP@1.0".
        points: P, at least 2.
        seed: seed of the two halves and of the items drawn to fit the maps.
        fit_on: queries to fit the maps on, for all queries; by default each half uses the maps of the other.

    Returns:
        (order, mode) -> the metric of each valid query, (P, V).
    """
    half_Q = np.random.default_rng(seed).permutation(len(relevance.self_Q)) % 2
    others = [np.flatnonzero(half_Q != half) if fit_on is None else fit_on for half in (0, 1)]
    fitted = _maps((before, after), relevance, others, modes, seed)
    shards = [_ScoredShard(shard, maps, half_Q) for shard, maps in zip((before, after), fitted, strict=True)]
    values = {(order, mode): np.empty((points, len(half_Q))) for order in orders for mode in modes}
    for rows in blocks(len(half_Q), 4 * len(before.items)):
        relevant_BN = relevance.relevant(rows)
        old, new = (shard.costs(rows, relevance.self_Q[rows], relevant_BN) for shard in shards)
        for (order, mode), measured_PQ in values.items():
            fuse, scale = (fused_values, RAW) if mode == RANK else (backfill_values, mode)
            measured_PQ[:, rows] = fuse(old[scale], new[scale], relevant_BN, orders[order], metric, points)
    return {key: measured_PQ[:, relevance.valid] for key, measured_PQ in values.items()}


def backfill_values(
    old_BN: Floats, new_BN: Floats, relevant_BN: Bools, order_N: Ints, metric: str = "cmc@1", points: int = POINTS
) -> Floats:
    """The metric of each query (P, B) while items move in this order.

    Args:
        old_BN: cost of each item before it moves, lower is better.
        new_BN: cost of each item after it has moved.
        relevant_BN: whether it is relevant.
        order_N: positions of items in the order in which they move.
        metric: "cmc@<k>" or "mAP@1.0".
        points: P, at least 2.
    """
    if metric == "cmc@1":
        return _first_is_right(old_BN, new_BN, relevant_BN, order_N, _bounds(len(order_N), points))
    mixed = (np.where(moved_N, new_BN, old_BN) for moved_N in _moved(order_N, points))
    return np.stack([_per_query(cost_BN, relevant_BN, metric) for cost_BN in mixed])


def fused_values(
    old_BN: Floats, new_BN: Floats, relevant_BN: Bools, order_N: Ints, metric: str = "cmc@1", points: int = POINTS
) -> Floats:
    """`backfill_values` by the ranking of `index.query.merge.merge_rank`.

    Items rank by their weighted ranks among the unmoved and the moved ones; of equal ones the unmoved comes first.
    """
    ranked_by = [np.lexsort((relevant_BN, cost_BN)) for cost_BN in (old_BN, new_BN)]
    values = []
    for moved_N in _moved(order_N, points):
        cost_BN = np.empty(old_BN.shape)
        here = [~moved_N, moved_N]
        for place_S, here_N, ranked_BN in zip(_places([int(h.sum()) for h in here]), here, ranked_by, strict=True):
            np.put_along_axis(cost_BN, ranked_BN[here_N[ranked_BN]].reshape(len(cost_BN), -1), place_S[None], axis=1)
        cost_BN[np.isinf(old_BN)] = np.inf  # a query's own image
        values.append(_per_query(cost_BN, relevant_BN, metric))
    return np.stack(values)


def _places(sizes: Sequence[int]) -> list[Floats]:
    """For each shard, the position in the merged list of each of its ranks (S,)."""
    share = np.concatenate([(1 + np.arange(size)) * sum(sizes) / max(size, 1) for size in sizes])
    place = np.empty(len(share))
    place[share.argsort(kind="stable")] = np.arange(len(share))
    return np.split(place, np.cumsum(sizes)[:-1])


class _ScoredShard:
    """Computes the costs of a block of queries, raw and by each kind of map."""

    def __init__(self, shard: Compared, maps: Mapping[str, Sequence[Calibration]], half_Q: Ints) -> None:
        self.space, self.maps, self.half_Q = shard.space, maps, half_Q
        self.queries, self.items = comparable(shard)

    def costs(self, rows: slice, self_B: Ints, relevant_BN: Bools) -> dict[str, Floats]:
        """Scale -> (B, N), lower is better; a query's own image has infinite cost and is not relevant."""
        score_BN = scores_of(costs(self.queries[rows], self.items, self.space), self.space)
        raw_BN = (-score_BN if self.space.higher_is_better else score_BN).astype(np.float64)
        made = {RAW: raw_BN, **{kind: np.empty_like(raw_BN) for kind in self.maps}}
        for kind, maps in self.maps.items():
            for half, fitted in enumerate(maps):
                mine = self.half_Q[rows] == half
                made[kind][mine] = -fitted.log_odds(score_BN[mine])
        for cost_BN in made.values():
            leave_out(self_B, cost_BN, relevant_BN)
        return made


def _maps(
    shards: Sequence[Compared], relevance: Relevance, others: Sequence[Ints], modes: Sequence[str], seed: int
) -> list[dict[str, list[Calibration]]]:
    """For each of `shards` and mode with maps: for each half of the queries, the map fitted on the other half."""
    fits = {CALIBRATED: fit_maps, LABEL_FREE: fit_evalue_maps}
    made = {
        mode: [fit(shards, relevance, rows, seed) for rows in others] for mode, fit in fits.items() if mode in modes
    }
    return [
        {mode: [of_half[number] for of_half in by_half] for mode, by_half in made.items()}
        for number in range(len(shards))
    ]


def _per_query(cost_BN: Floats, relevant_BN: Bools, metric: str) -> Floats:
    """The metric of each query of a block, all items ranked."""
    ks = [int(metric.removeprefix("cmc@"))] if metric.startswith("cmc@") else [1]
    return ranked(cost_BN.astype(np.float32), relevant_BN, ks).per_query(metric)


def _bounds(items: int, points: int) -> list[int]:
    """The number of moved items at each point."""
    return [round(share * items) for share in np.linspace(0, 1, points)]


def _moved(order_N: Ints, points: int) -> Iterator[Bools]:
    """Whether each item (N,) has moved, for each point."""
    position_N = np.argsort(order_N)
    return (position_N < bound for bound in _bounds(len(order_N), points))


def _first_is_right(old_BN: Floats, new_BN: Floats, relevant_BN: Bools, order_N: Ints, bounds: Sequence[int]) -> Floats:
    """CMC@1 (P, B) without ranking: whether the best relevant item beats the best other one; a tie is a miss."""
    best_relevant = _best(np.where(relevant_BN, old_BN, np.inf), np.where(relevant_BN, new_BN, np.inf), order_N, bounds)
    best_other = _best(np.where(relevant_BN, np.inf, old_BN), np.where(relevant_BN, np.inf, new_BN), order_N, bounds)
    return (best_relevant < best_other).astype(np.float64)


def _best(old_BN: Floats, new_BN: Floats, order_N: Ints, bounds: Sequence[int]) -> Floats:
    """Lowest cost (P, B) if the first `bounds[p]` items of the order cost `new` and the others `old`."""

    def steps(cost_BN: Floats) -> Iterator[Floats]:
        for start, end in itertools.pairwise(bounds):
            yield cost_BN[:, order_N[start:end]].min(axis=1, initial=np.inf)

    none = [np.full(len(old_BN), np.inf)]
    moved_PB = np.minimum.accumulate(np.stack([*none, *steps(new_BN)]))
    unmoved_PB = np.minimum.accumulate(np.stack([*steps(old_BN), *none])[::-1])[::-1]
    return np.minimum(moved_PB, unmoved_PB)


def _curve(measured_PQ: Floats) -> MeasuredCurve:
    shares_P = np.linspace(0, 1, len(measured_PQ))
    curve = BackfillCurve(shares_P, measured_PQ.mean(axis=1))
    return MeasuredCurve(curve, mean_interval(np.trapezoid(measured_PQ, shares_P, axis=0)))
