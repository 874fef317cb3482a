"""The order of a backfill (`backfill_order`), and its curve: the metric while the gallery moves from old to new.

Shape suffixes: N items, P points of the curve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.errors import InvalidArgument
from index.space import Vectors

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

POINTS = 21
"""Points of a curve: 0, 5, ... 100 % of the items moved."""


@dataclass(frozen=True)
class PendingItems:
    """The N items that a backfill has to move.

    Attributes:
        stored: (N,) time at which each was stored, as any increasing number.
        uncertainty: (N,) the forward transform's uncertainty of each, if known.
        matches: (N,) how often each was a match of queries, if counted.
        transformed: (N,) whether an item edge has already moved each, if possible.
        seed: seed of a random order.
    """

    stored: ArrayLike
    uncertainty: ArrayLike | None = None
    matches: ArrayLike | None = None
    transformed: ArrayLike | None = None
    seed: int = 0


def _random(pending: PendingItems) -> Ints:
    return np.random.default_rng(pending.seed).permutation(len(np.asarray(pending.stored)))


def _newest(pending: PendingItems) -> Ints:
    return np.argsort(-np.asarray(pending.stored, np.float64), kind="stable")


def _oldest(pending: PendingItems) -> Ints:
    return np.argsort(np.asarray(pending.stored, np.float64), kind="stable")


def _uncertainty(pending: PendingItems) -> Ints:
    return _highest_first("uncertainty", "uncertainty", pending.uncertainty, pending)


def _traffic(pending: PendingItems) -> Ints:
    return _highest_first("traffic", "number of matches", pending.matches, pending)


def _transformed(pending: PendingItems) -> Ints:
    return _highest_first("transformed", "mark", pending.transformed, pending)


def _highest_first(order: str, what: str, scores: ArrayLike | None, pending: PendingItems) -> Ints:
    scores_N = np.asarray(scores, np.float64)
    if scores_N.shape != np.shape(pending.stored):
        raise InvalidArgument(f"order {order!r} needs one {what} per item", pointer="/order")
    return np.argsort(-scores_N, kind="stable")


ORDERS: dict[str, Callable[[PendingItems], Ints]] = {
    "random": _random,
    "newest": _newest,
    "oldest": _oldest,
    "uncertainty": _uncertainty,
    "traffic": _traffic,
    "transformed": _transformed,
}
"""Order -> function of the positions of items, first to move first. `uncertainty`: the most uncertain ones of the
forward transform first (FastFill); `traffic`: those that queries match most; `transformed`: those that an item edge has
already moved.
"""


def hyperbolic_uncertainty(curvature: float, x_ND: Vectors) -> Floats:
    """Uncertainty (N,) in (0, 1], larger for embeddings near the origin of hyperbolic space.

    1 - tanh(sqrt(K) |v|), v the tangent vector at the origin (HBCT, Bui 2025, 2506.05826, eq. 10, for any K).

    Args:
        curvature: K, above 0; the space has curvature -K.
        x_ND: (N, D) space parts, as stored.
    """
    scaled_N = np.sqrt(curvature) * np.linalg.norm(x_ND.astype(np.float64), axis=1)
    uncertain_N: Floats = 1.0 - np.tanh(np.arcsinh(scaled_N))
    return uncertain_N


def ranks(scores_N: ArrayLike) -> Floats:
    """Share of scores below each (N,), in [0, 1); equal for ties. Makes scores of different scales comparable."""
    given_N = np.asarray(scores_N, np.float64)
    below_N: Floats = np.searchsorted(np.sort(given_N), given_N) / max(len(given_N), 1)
    return below_N


def backfill_order(order: str, pending: PendingItems) -> Ints:
    """Positions (N,) of the pending items, first to move first.

    Raises:
        InvalidArgument: `order` is not one of `ORDERS`, or data that it needs are missing.
    """
    if order not in ORDERS:
        raise InvalidArgument(f"order must be one of {', '.join(ORDERS)}, not {order!r}", pointer="/order")
    return ORDERS[order](pending)


@dataclass(frozen=True)
class BackfillCurve:
    """A metric while items move: `values[p]` after the share `shares[p]` of items has moved, (P,) each."""

    shares: Floats
    values: Floats

    @property
    def area(self) -> float:
        """Area under the curve (trapezoidal rule): the mean of the metric over the whole backfill."""
        return float(np.trapezoid(self.values, self.shares))

    @property
    def largest_dip(self) -> float:
        """Largest drop of the metric below its previous maximum; 0 if it never falls."""
        return float((np.maximum.accumulate(self.values) - self.values).max())
