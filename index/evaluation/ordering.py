"""The order of a backfill, and the curve it gives: the metric while the gallery moves from old to new.

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
"""A curve is measured at 0, 5, ... 100 % of the items moved."""


@dataclass(frozen=True)
class PendingItems:
    """The N items a backfill has to move.

    Attributes:
        stored: (N,) when each was stored; any number that grows with time.
        uncertainty: (N,) the forward transform's uncertainty of each, if known.
        matches: (N,) how often each was matched by queries, if counted.
        transformed: (N,) whether an item edge has moved each already, if that can be.
        seed: of a random order.
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
"""Which items move first. `uncertainty`: the most uncertain ones of the forward transform (FastFill); `traffic`: those
that queries match most; `transformed`: those that an item edge moved, before those that nothing moved yet.
"""


def hyperbolic_uncertainty(curvature: float, x_ND: Vectors) -> Floats:
    """(N,) in (0, 1]: an embedding near the origin of hyperbolic space is unsure.

    1 - tanh(sqrt(K) |v|), v the tangent vector at the origin (HBCT, Bui 2025, 2506.05826, eq. 10, for any K).

    Args:
        curvature: K, above 0; the space has curvature -K.
        x_ND: (N, D) space parts, as stored.
    """
    scaled_N = np.sqrt(curvature) * np.linalg.norm(x_ND.astype(np.float64), axis=1)
    uncertain_N: Floats = 1.0 - np.tanh(np.arcsinh(scaled_N))
    return uncertain_N


def ranks(scores_N: ArrayLike) -> Floats:
    """(N,) in [0, 1): the share of scores below each. Equal scores rank equally; makes scores of two scales one."""
    given_N = np.asarray(scores_N, np.float64)
    below_N: Floats = np.searchsorted(np.sort(given_N), given_N) / max(len(given_N), 1)
    return below_N


def backfill_order(order: str, pending: PendingItems) -> Ints:
    """Positions (N,) of the waiting items, first to move first.

    Raises:
        InvalidArgument: `order` is not one of `ORDERS`, or it needs an uncertainty that is not there.
    """
    if order not in ORDERS:
        raise InvalidArgument(f"order must be one of {', '.join(ORDERS)}, not {order!r}", pointer="/order")
    return ORDERS[order](pending)


@dataclass(frozen=True)
class BackfillCurve:
    """A metric while items move: `values[p]` with the share `shares[p]` of them moved, (P,) each."""

    shares: Floats
    values: Floats

    @property
    def area(self) -> float:
        """Area under the curve: the metric's mean over the whole backfill (trapezoids)."""
        return float(np.trapezoid(self.values, self.shares))

    @property
    def largest_dip(self) -> float:
        """How far the metric ever falls below what it had reached before; 0 when it never falls."""
        return float((np.maximum.accumulate(self.values) - self.values).max())
