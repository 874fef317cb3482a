"""A calibration without labels: how many random items would score at least as well?

Where classes are unknown, a score is judged by what chance gives. Of N items that have nothing to do with a query,
E(s) = N * P(a random pair scores at least as well as s) are expected to reach score s: the E-value of sequence search
(BLAST: Karlin and Altschul 1990; Altschul 1997). One relevant item among those E makes the odds 1 : E, so

    log-odds(s) = -log E(s) = -log(N * tail(s)).

Scores of two versions rank together by it, because a score that one random item in a million reaches says the same in
both. Only the order is meant: the probability 1 / (1 + E) is right for a query with exactly one relevant item.

`tail` is estimated on P random pairs of a query and an item, scored through the route that the map is for: at knots it
is the share of pairs at least as good, down to the best quarter. Beyond, it falls exponentially, at the rate of that
quarter's median excess. Extrapolating from so early is deliberate: some random pairs are right, and the better a
version is, the more its far tail holds nothing else. Counted as chance they would turn the order round (with the ten
classes of digits they did); a median bears them as long as fewer than about one pair in eight is right.

Every map of a gallery must be given the same N, the items of the whole gallery: it then shifts all of them alike and
leaves every ranking as it is. The result is an ordinary `Calibration`: same JSON, strictly monotone, so the order
inside a shard never changes. Shape suffixes: P pairs, K knots.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.calibration import Calibration, Floats
from index.errors import InvalidArgument

Ints = NDArray[np.int64]

KNOTS = 32
TAIL = 4
"""One pair in so many, the best, is beyond the last knot."""
RESOLUTION = 1e-9
"""Scores that differ by less are the same: they were float32."""


def fit_evalue(scores: ArrayLike, items: int, *, higher_is_better: bool) -> Calibration:
    """Fit the map on scores of random pairs of a query and an item.

    Args:
        scores: (P,) what a user reads, finite; the pairs drawn independently of their score, a query never with itself.
        items: N, at least 1: how many items the gallery holds, the same for all maps that rank together.
        higher_is_better: the order of the scores.

    Raises:
        InvalidArgument: no pairs, numbers that are not finite, or `items` below 1.
    """
    scores_P = np.asarray(scores, np.float64)
    if scores_P.ndim != 1 or not len(scores_P) or not np.isfinite(scores_P).all():
        raise InvalidArgument("a calibration needs the finite scores of at least one random pair", pointer="/scores")
    if items < 1:
        raise InvalidArgument(f"items must be at least 1, not {items}", pointer="/items")
    sign = 1.0 if higher_is_better else -1.0
    goodness_P = np.sort(sign * scores_P)
    knots_K = np.unique(goodness_P[_places(len(goodness_P))])
    reached_K = len(goodness_P) - np.searchsorted(goodness_P, knots_K)
    expected_K = items * reached_K / (len(goodness_P) + 1)
    order = slice(None, None, int(sign))
    return Calibration(
        (sign * knots_K)[order], (1.0 / (1.0 + expected_K))[order], sign * _rate(goodness_P, knots_K[-1])
    )


def _places(pairs: int) -> Ints:
    """Which of the pairs, worst first, are knots: the tails they leave fall evenly in the logarithm."""
    left = np.geomspace(pairs, min(pairs, max(2, pairs // TAIL)), KNOTS)
    return np.asarray(pairs - np.round(left).astype(np.int64))


def _rate(goodness_P: Floats, last: float) -> float:
    """How fast the tail falls beyond the last knot, per unit of goodness: half of an exponential's excess is log 2."""
    beyond = goodness_P[goodness_P > last] - last
    # Where every pair beyond scores the same, all there is to go by is the spread.
    middle = np.median(beyond) if len(beyond) else np.log(2) * goodness_P.std()
    return float(np.log(2) / middle) if middle > RESOLUTION else 1.0
