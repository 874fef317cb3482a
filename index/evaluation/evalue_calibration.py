"""Calibration without labels (`fit_evalue`): how many random items would score at least as well?

Without labels, a score is judged by chance. Of N items unrelated to a query, E(s) = N * P(a random pair scores at least
as well as s) are expected to reach score s: the E-value of sequence search (BLAST: Karlin and Altschul 1990; Altschul
1997). One relevant item among those E has the odds 1 : E, so

    log-odds(s) = -log E(s) = -log(N * tail(s)).

This makes scores of two versions comparable: a score that one random item in a million reaches means the same in both.
Only the order is meaningful: the probability 1 / (1 + E) holds for a query with exactly one relevant item.

`tail` is estimated on P random pairs of a query and an item, scored along the route that the map is for. At knots, down
to the best quarter, it is the share of pairs that score at least as well. Beyond, it falls exponentially, at the rate
of the median excess of that quarter. It is extrapolated from so early on purpose: some random pairs are relevant, and
in a good version the far tail consists of them. Counted as chance they would reverse the order (with the ten classes of
digits they did); the median tolerates them up to about one relevant pair in eight.

All maps of a gallery must use the same N, the items of the whole gallery: it shifts all of them equally and changes no
ranking. The result is an ordinary `Calibration`: same JSON, strictly monotone, so the order inside a shard never
changes. Shape suffixes: P pairs, K knots.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.edges.calibration import Calibration, Floats
from index.errors import InvalidArgument

Ints = NDArray[np.int64]

KNOTS = 32
TAIL = 4
"""The best 1 / TAIL of the pairs are beyond the last knot."""
RESOLUTION = 1e-9
"""Scores that differ by less are equal: they were float32."""


def fit_evalue(scores: ArrayLike, items: int, *, higher_is_better: bool) -> Calibration:
    """Fit the map on scores of random pairs of a query and an item.

    Args:
        scores: (P,) as users see them, finite, of pairs drawn independently of their score, never a query with itself.
        items: N, at least 1: number of items of the gallery, the same for all maps that are used together.
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
    """The positions of the knots among the pairs, worst first; their tails are evenly spaced in the logarithm."""
    left = np.geomspace(pairs, min(pairs, max(2, pairs // TAIL)), KNOTS)
    return np.asarray(pairs - np.round(left).astype(np.int64))


def _rate(goodness_P: Floats, last: float) -> float:
    """The rate of the tail beyond the last knot, per unit of goodness: an exponential's median is log 2 / rate."""
    beyond = goodness_P[goodness_P > last] - last
    # No pair is beyond the last knot: estimate the median from the standard deviation of all.
    middle = np.median(beyond) if len(beyond) else np.log(2) * goodness_P.std()
    return float(np.log(2) / middle) if middle > RESOLUTION else 1.0
