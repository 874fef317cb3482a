"""Agreement of two rankings of the same items, measured in a shadow deployment.

Rankings are keys, best first, padded with -1. Shape suffixes: Q queries, K results.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from index.engines.base import MISSING, Keys

Floats = NDArray[np.float64]

RANKED = 1000
"""Largest number of results whose order is compared: the pairs of twice as many items fit into memory."""


def overlap(old_QK: Keys, new_QK: Keys) -> Floats:
    """Share (Q,) of the old results that are among the new ones, in [0, 1]; NaN without old results."""
    return np.array(
        [_share(old_K[old_K != MISSING], new_K) for old_K, new_K in zip(old_QK, new_QK, strict=True)], np.float64
    )


def rank_correlation(old_QK: Keys, new_QK: Keys) -> Floats:
    """Kendall's tau (Q,) of two top-k lists, in [-1, 1]; NaN if they have fewer than two items together.

    The mean over all pairs of items in either list: 1 for a pair in the same order, -1 in the opposite order. An item
    that is not in a list ranks after all that are; a pair that is not in a list has no order there and counts 0. So 1
    is the same list, -1 the reversed list, about -1/2 nothing in common. It equals 1 - 2 K / pairs with the Kendall
    distance K of top k lists for p = 1/2 (Fagin, Kumar and Sivakumar 2003, "Comparing top k lists"). Only the first
    RANKED results count.
    """
    rows = zip(old_QK[:, :RANKED], new_QK[:, :RANKED], strict=True)
    return np.array([_tau(old_K, new_K) for old_K, new_K in rows], np.float64)


def first_match_flips(old_QK: Keys, new_QK: Keys) -> int:
    """Number of queries whose first match differs."""
    return int((old_QK[:, :1] != new_QK[:, :1]).sum())


def _share(old_K: Keys, new_K: Keys) -> float:
    return float(np.isin(old_K, new_K).mean()) if len(old_K) else float("nan")


def _tau(old_K: Keys, new_K: Keys) -> float:
    items_N = np.union1d(old_K[old_K != MISSING], new_K[new_K != MISSING])
    pairs = len(items_N) * (len(items_N) - 1)
    if not pairs:
        return float("nan")
    old_N, new_N = _places(old_K, items_N), _places(new_K, items_N)
    order_NN = np.sign(old_N[:, None] - old_N) * np.sign(new_N[:, None] - new_N)
    return float(order_NN.sum() / pairs)


def _places(ranked_K: Keys, items_N: Keys) -> NDArray[np.int64]:
    """The position of each item in a ranking; items that are not in it come after all that are."""
    held_K = ranked_K[ranked_K != MISSING]
    places_N = np.full(len(items_N), len(held_K), np.int64)
    places_N[np.searchsorted(items_N, held_K)] = np.arange(len(held_K))
    return places_N
