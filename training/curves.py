"""Backfill curves: the metric while a gallery moves from an old version to a new one, item by item.

At each share the unmoved items are met along their route and the moved ones in the new version. Both rank as one list:
by raw scores, as serving merges them, and calibrated, by the log-odds of `index.calibration`. Each half of the queries
is ranked with the maps fitted on the other half, so no query is measured with a map that has seen it.

Shape suffixes: Q queries, N items, P points of the curve, B one block of queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from index.calibration import Calibration
from index.evaluation import Compared, blocks, comparable, costs, leave_out, mean_interval, ranked
from index.matching import Matching, fit_map, read_scores
from index.ordering import POINTS, BackfillCurve
from index.version import Score

RAW, CALIBRATED = "raw", "calibrated"

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Table = NDArray[np.float32]


@dataclass(frozen=True)
class Curve:
    """A measured curve, and the metric's mean over the whole backfill with its interval over queries."""

    curve: BackfillCurve
    area: Score


def measure_curves(
    before: Compared,
    after: Compared,
    matching: Matching,
    orders: Mapping[str, Ints],
    *,
    metric: str = "cmc@1",
    points: int = POINTS,
    seed: int = 0,
) -> dict[tuple[str, str], Curve]:
    """Measure a backfill in several orders, raw and calibrated.

    Args:
        before: how the queries meet the items where no item has moved.
        after: how they meet them where all have; items in the same order.
        matching: what is right.
        orders: name -> (N,) positions, first to move first.
        metric: "cmc@<k>" or "mAP@1.0".
        points: at least 2.
        seed: of the two halves and of the items drawn to fit the maps.

    Returns:
        (order, "raw" or "calibrated") -> curve.
    """
    half_Q = np.random.default_rng(seed).permutation(len(matching.query_codes)) % 2
    sides = [_Way(side, _maps(side, matching, half_Q, seed), half_Q) for side in (before, after)]
    values = {(order, scale): np.empty((points, len(half_Q))) for order in orders for scale in (RAW, CALIBRATED)}
    for rows in blocks(len(half_Q), 4 * len(matching.item_codes)):
        relevant_BN = matching.relevant(rows)
        old, new = (side.costs(rows, matching.self_Q[rows], relevant_BN) for side in sides)
        for (order, scale), measured_PQ in values.items():
            measured_PQ[:, rows] = backfill_values(old[scale], new[scale], relevant_BN, orders[order], metric, points)
    return {key: _curve(measured_PQ[:, matching.valid]) for key, measured_PQ in values.items()}


def backfill_values(
    old_BN: Floats, new_BN: Floats, relevant_BN: Bools, order_N: Ints, metric: str = "cmc@1", points: int = POINTS
) -> Floats:
    """The metric of each query, (P, B), while items move in this order.

    Args:
        old_BN: cost of each item as long as it has not moved, lower is better.
        new_BN: cost once it has.
        relevant_BN: whether it is right.
        order_N: positions, first to move first.
        metric: "cmc@<k>" or "mAP@1.0".
        points: P, at least 2.
    """
    bounds = [round(share * len(order_N)) for share in np.linspace(0, 1, points)]
    if metric == "cmc@1":
        return _first_is_right(old_BN, new_BN, relevant_BN, order_N, bounds)
    ks = [int(metric.removeprefix("cmc@"))] if metric.startswith("cmc@") else [1]
    position_N = np.argsort(order_N)
    mixed = (np.where(position_N < bound, new_BN, old_BN).astype(np.float32) for bound in bounds)
    return np.stack([ranked(cost_BN, relevant_BN, ks).per_query(metric) for cost_BN in mixed])


class _Way:
    """One way to compare: costs of a block of queries, raw and calibrated."""

    def __init__(self, side: Compared, maps: Sequence[Calibration], half_Q: Ints) -> None:
        self.space, self.maps, self.half_Q = side.space, maps, half_Q
        self.queries, self.items = comparable(side)

    def costs(self, rows: slice, self_B: Ints, relevant_BN: Bools) -> dict[str, Floats]:
        """Scale -> (B, N), lower is better; a query's own image costs infinitely much and is not relevant."""
        score_BN = read_scores(costs(self.queries[rows], self.items, self.space), self.space)
        raw_BN = (-score_BN if self.space.higher_is_better else score_BN).astype(np.float64)
        calibrated_BN = np.empty_like(raw_BN)
        for half, fitted in enumerate(self.maps):
            mine = self.half_Q[rows] == half
            calibrated_BN[mine] = -fitted.log_odds(score_BN[mine])
        for cost_BN in (raw_BN, calibrated_BN):
            leave_out(self_B, cost_BN, relevant_BN)
        return {RAW: raw_BN, CALIBRATED: calibrated_BN}


def _maps(side: Compared, matching: Matching, half_Q: Ints, seed: int) -> list[Calibration]:
    """For each half of the queries the map fitted on the other."""
    return [fit_map(side, matching, np.flatnonzero(half_Q != half), seed) for half in (0, 1)]


def _first_is_right(old_BN: Floats, new_BN: Floats, relevant_BN: Bools, order_N: Ints, bounds: Sequence[int]) -> Floats:
    """CMC@1 at every point without ranking: the best right item against the best wrong one, wrong ones first."""
    right = _best(np.where(relevant_BN, old_BN, np.inf), np.where(relevant_BN, new_BN, np.inf), order_N, bounds)
    wrong = _best(np.where(relevant_BN, np.inf, old_BN), np.where(relevant_BN, np.inf, new_BN), order_N, bounds)
    return (right < wrong).astype(np.float64)


def _best(old_BN: Floats, new_BN: Floats, order_N: Ints, bounds: Sequence[int]) -> Floats:
    """(P, B) lowest cost when the first `bounds[p]` items of the order cost `new` and the others `old`."""

    def steps(cost_BN: Floats) -> Iterator[Floats]:
        for start, end in itertools.pairwise(bounds):
            yield cost_BN[:, order_N[start:end]].min(axis=1, initial=np.inf)

    none = [np.full(len(old_BN), np.inf)]
    moved_PB = np.minimum.accumulate(np.stack([*none, *steps(new_BN)]))
    unmoved_PB = np.minimum.accumulate(np.stack([*steps(old_BN), *none])[::-1])[::-1]
    return np.minimum(moved_PB, unmoved_PB)


def _curve(measured_PQ: Floats) -> Curve:
    shares_P = np.linspace(0, 1, len(measured_PQ))
    curve = BackfillCurve(shares_P, measured_PQ.mean(axis=1))
    return Curve(curve, mean_interval(np.trapezoid(measured_PQ, shares_P, axis=0)))
