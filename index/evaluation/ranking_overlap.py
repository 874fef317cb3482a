"""How far two rankings of the same items agree: what a shadow deployment measures.

Rankings are keys, best first, padded with -1. Shape suffixes: Q queries, K results.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from index.engines.base import MISSING, Keys

Floats = NDArray[np.float64]

RANKED = 1000
"""Results whose order is compared at most: the pairs of twice as many items fit into memory."""


def overlap(old_QK: Keys, new_QK: Keys) -> Floats:
    """(Q,) share of the old results that are among the new ones, in [0, 1]; NaN where there were none."""
    return np.array(
        [_share(old_K[old_K != MISSING], new_K) for old_K, new_K in zip(old_QK, new_QK, strict=True)], np.float64
    )


def rank_correlation(old_QK: Keys, new_QK: Keys) -> Floats:
    """(Q,) Kendall's tau of two lists of best results, in [-1, 1]; NaN where they hold fewer than two items together.

    Over the pairs of all items that either list holds: 1 for a pair in the same order, -1 for one in the opposite
    order. An item that a list does not hold stands behind all that it does; a pair that a list does not hold is in no
    order there and counts 0. So 1 is the same list, -1 the same items the other way round, about -1/2 nothing in
    common. It is 1 - 2 K / pairs, K the Kendall distance of top k lists with p = 1/2 (Fagin, Kumar and Sivakumar 2003,
    "Comparing top k lists"). Only the first RANKED results count.
    """
    rows = zip(old_QK[:, :RANKED], new_QK[:, :RANKED], strict=True)
    return np.array([_tau(old_K, new_K) for old_K, new_K in rows], np.float64)


def first_match_flips(old_QK: Keys, new_QK: Keys) -> int:
    """Number of queries whose first match is another item."""
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
    """Where each item stands; what is not ranked stands behind all that is."""
    held_K = ranked_K[ranked_K != MISSING]
    places_N = np.full(len(items_N), len(held_K), np.int64)
    places_N[np.searchsorted(items_N, held_K)] = np.arange(len(held_K))
    return places_N
