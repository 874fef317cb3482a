"""Score calibration: a monotone map from the score of a match to the probability that the match is relevant.

Scores of two versions, or of two edges to one version, are not comparable: 0.7 may be a sure match in one and a poor
match in the other. Probabilities are. The map is fitted by isotonic regression on pairs of a query and an item with
known relevance (pool adjacent violators: Ayer 1955; for calibration: Zadrozny and Elkan 2002). It is strictly monotone
in log-odds, also between and beyond its knots, so it never changes the order inside one shard.

The JSON of one map inside the `calibration` field of an edge.json:

    {"kind": "isotonic", "scores": [...], "probabilities": [...], "slope": 9.5}

`scores` are the K >= 1 knots in rising order, as users see scores (`Space.score`). `probabilities`, in (0, 1), rise
with them if higher scores are better, else they fall. `slope` (positive or negative, likewise) is the change of
log-odds per unit of score before the first and after the last knot. Between knots log-odds are linear.

The field holds two such maps, because a gallery ranks items reached by the edge together with the new version's items:

    "calibration": {"edge": <queries of the new version, items of the old>, "own": <both of the new version>,
                    "mode": <optional: the best merge mode for both, see `index.evaluation.modes`>}

Shape suffixes: P pairs, K knots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.errors import InvalidArgument

Floats = NDArray[np.float64]

KIND = "isotonic"
PRIOR = 0.5
"""Relevant pairs, and as many irrelevant ones, added to each step (Jeffreys prior): few pairs are never certain."""

MAX_LOG_ODDS = 20.0
"""Largest absolute log-odds of a knot: beyond it probabilities round to nearly the same number."""
MAX_REMAINING = 0.9
"""Pooling is vectorised as long as each pass leaves at most this share of the values."""


@dataclass(frozen=True)
class Calibration:
    """A strictly monotone map from scores to probabilities; the module docstring defines the fields."""

    scores_K: Floats
    probabilities_K: Floats
    slope: float

    def __call__(self, scores: ArrayLike) -> Floats:
        """Scores of any shape -> the probability, in [0, 1], that such a match is relevant."""
        return np.asarray(probability(self.log_odds(scores)))

    def log_odds(self, scores: ArrayLike) -> Floats:
        """Scores of any shape -> log(p / (1 - p)); ranking by it separates scores whose probabilities round to 1."""
        scores, (lowest, highest, odds_K) = np.asarray(scores, np.float64), self._knots
        beyond = scores - np.minimum(np.maximum(scores, lowest), highest)
        return np.asarray(np.interp(scores, self.scores_K, odds_K) + self.slope * beyond)

    @cached_property
    def _knots(self) -> tuple[float, float, Floats]:
        """The lowest and highest score of a knot, and the log-odds of all knots (K,); cached for all queries."""
        return float(self.scores_K[0]), float(self.scores_K[-1]), _log_odds(self.probabilities_K)

    def as_json(self) -> dict[str, Any]:
        """One map of the `calibration` field."""
        return {
            "kind": KIND,
            "scores": self.scores_K.tolist(),
            "probabilities": self.probabilities_K.tolist(),
            "slope": self.slope,
        }


def probability(log_odds: NDArray[np.floating[Any]]) -> Floats:
    """Log-odds of any shape -> probabilities in [0, 1]."""
    likely: Floats = np.exp(-np.logaddexp(0.0, -log_odds))  # does not overflow
    return likely


def fit_calibration(
    scores: ArrayLike, relevant: ArrayLike, *, higher_is_better: bool, weights: ArrayLike | None = None
) -> Calibration:
    """Fit the map on pairs of a query and an item.

    Args:
        scores: (P,) as users see them, finite.
        relevant: (P,) whether the item is relevant to the query.
        higher_is_better: the order of the scores.
        weights: (P,) number of pairs that each represents, above 0; 1 by default.

    Raises:
        InvalidArgument: no pairs, shapes that do not fit, numbers that are not finite, or weights not above 0.
    """
    scores_P, relevant_P = np.asarray(scores, np.float64), np.asarray(relevant, np.float64)
    weights_P = np.ones(len(scores_P)) if weights is None else np.asarray(weights, np.float64)
    if not len(scores_P) or scores_P.ndim != 1 or not scores_P.shape == relevant_P.shape == weights_P.shape:
        raise InvalidArgument("a calibration needs pairs: one score, one answer and one weight each")
    if not (np.isfinite(scores_P).all() and np.isfinite(weights_P).all() and (weights_P > 0).all()):
        raise InvalidArgument("a calibration needs finite scores, and weights above 0")
    sign = 1.0 if higher_is_better else -1.0
    goodness, row_P = np.unique(sign * scores_P, return_inverse=True)
    weight: Floats = np.bincount(row_P, weights_P).astype(np.float64)
    rate, step = pool_adjacent_violators(np.bincount(row_P, weights_P * relevant_P) / weight, weight)
    # The prior moves small steps towards one half, which can break the order: pool again.
    size = np.bincount(step, weight) + 2 * PRIOR
    rate, joined = pool_adjacent_violators((rate * (size - 2 * PRIOR) + PRIOR) / size, size)
    mean = np.bincount(joined[step], weight * goodness) / np.bincount(joined[step], weight)
    order = slice(None, None, int(sign))
    return Calibration((sign * mean)[order], rate[order], sign * _slope(mean, rate, goodness, weight))


def blend(own: Calibration, common: Calibration, share: float) -> Calibration:
    """Interpolate two maps: log-odds (1 - share) own + share common.

    Args:
        own: a map.
        common: a map for scores of the same order.
        share: in [0, 1].
    """
    knots_K = np.union1d(own.scores_K, common.scores_K)
    odds_K = (1 - share) * own.log_odds(knots_K) + share * common.log_odds(knots_K)
    slope = (1 - share) * own.slope + share * common.slope
    # Far from a map's own knots its probability rounds to 0 or 1: drop these knots, the slope extrapolates.
    kept_K = np.abs(odds_K) < MAX_LOG_ODDS
    if not kept_K.any():
        kept_K[np.abs(odds_K).argmin()] = True
    probability_K = 1.0 / (1.0 + np.exp(-odds_K[kept_K].clip(-MAX_LOG_ODDS, MAX_LOG_ODDS)))
    rising_K = np.r_[True, np.diff(np.maximum.accumulate(np.sign(slope) * probability_K)) > 0]
    return Calibration(knots_K[kept_K][rising_K], probability_K[rising_K], slope)


def calibration_from_json(value: object) -> Calibration:
    """Read one map of the `calibration` field.

    Raises:
        InvalidArgument: not such a map; names the field.
    """
    fields = {"kind", "scores", "probabilities", "slope"}
    if not isinstance(value, Mapping) or set(value) != fields or value["kind"] != KIND:
        raise _wrong("", f"must hold kind {KIND!r}, scores, probabilities and slope")
    scores, probabilities = (_numbers(value[name], name) for name in ("scores", "probabilities"))
    slope = float(_numbers([value["slope"]], "slope")[0])
    if slope == 0:
        raise _wrong("slope", "must not be 0")
    if not (np.diff(scores) > 0).all():
        raise _wrong("scores", "must rise strictly")
    if scores.shape != probabilities.shape or not ((probabilities > 0) & (probabilities < 1)).all():
        raise _wrong("probabilities", "must lie above 0 and below 1, one for each score")
    if not (np.sign(slope) * np.diff(probabilities) > 0).all():
        raise _wrong("probabilities", "must rise strictly where slope is above 0, and fall where it is below")
    return Calibration(scores, probabilities, slope)


def pool_adjacent_violators(values: ArrayLike, weights: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    """Isotonic regression: the non-decreasing sequence with the least weighted squared error (Ayer 1955).

    Args:
        values: (P,) in the order of the predictor.
        weights: (P,) above 0.

    Returns:
        The values of the S <= P steps, strictly rising, and the step of each input value (P,).
    """
    weight = np.asarray(weights, np.float64)
    total, step = np.asarray(values, np.float64) * weight, np.arange(len(weight))
    # Merge falling runs in NumPy first: labels of 0 and 1 shrink to few runs before the Python loop.
    while len(total) > 1:
        run = np.r_[0, np.cumsum(np.diff(total / weight) > 0)]
        if run[-1] + 1 > MAX_REMAINING * len(run):
            break
        total, weight = (np.bincount(run, one).astype(np.float64) for one in (total, weight))
        step = run[step]
    rate, pooled = _pool_one_by_one(total, weight)
    return rate, pooled[step]


def _pool_one_by_one(total_R: Floats, weight_R: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """`pool_adjacent_violators` of R runs, given as weighted sums and weights, in linear time."""
    total: list[float] = []
    weight: list[float] = []
    count: list[int] = []
    for run_total, run_weight in zip(total_R.tolist(), weight_R.tolist(), strict=True):
        summed, heavy, many = run_total, run_weight, 1
        while total and total[-1] / weight[-1] >= summed / heavy:
            summed, heavy, many = summed + total.pop(), heavy + weight.pop(), many + count.pop()
        total.append(summed)
        weight.append(heavy)
        count.append(many)
    return np.array(total) / np.array(weight), np.repeat(np.arange(len(count)), count)


def _slope(mean_K: Floats, rate_K: Floats, goodness: Floats, weight: Floats) -> float:
    """Log-odds per unit of goodness from the first to the last knot; for one knot, 1 per standard deviation."""
    if len(mean_K) > 1:
        return float(np.diff(_log_odds(rate_K[[0, -1]]))[0] / (mean_K[-1] - mean_K[0]))
    spread = float(np.sqrt(np.average((goodness - mean_K[0]) ** 2, weights=weight)))
    return 1.0 / spread if spread else 1.0


def _log_odds(p: Floats) -> Floats:
    return np.log(p) - np.log1p(-p)


def _numbers(value: object, field: str) -> Floats:
    plain = isinstance(value, list) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in value)
    try:
        numbers = np.asarray(value if plain else [], np.float64)
    except OverflowError:  # an integer beyond float64
        numbers = np.array([np.inf])
    if not len(numbers) or not np.isfinite(numbers).all():
        raise _wrong(field, "must be finite numbers")
    return numbers


def _wrong(field: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"calibration {field} {why}".replace("  ", " "), pointer=f"/calibration/{field}".rstrip("/"))
