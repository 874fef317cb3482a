"""How far two rankings of the same items agree: what a shadow deployment measures.

Rankings are keys, best first, padded with -1. Shape suffixes: Q queries, K results.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from index.shard import MISSING, Keys

Floats = NDArray[np.float64]


def overlap(old_QK: Keys, new_QK: Keys) -> Floats:
    """(Q,) share of the old results that are among the new ones, in [0, 1]; NaN where there were none."""
    return np.array(
        [_share(old_K[old_K != MISSING], new_K) for old_K, new_K in zip(old_QK, new_QK, strict=True)], np.float64
    )


def rank_correlation(old_QK: Keys, new_QK: Keys) -> Floats:
    """(Q,) Spearman's rho over the items both rankings hold, in [-1, 1]; NaN where these are fewer than two."""
    return np.array([_rho(old_K, new_K) for old_K, new_K in zip(old_QK, new_QK, strict=True)], np.float64)


def first_match_flips(old_QK: Keys, new_QK: Keys) -> int:
    """Number of queries whose first match is another item."""
    return int((old_QK[:, 0] != new_QK[:, 0]).sum())


def _share(old_K: Keys, new_K: Keys) -> float:
    return float(np.isin(old_K, new_K).mean()) if len(old_K) else float("nan")


def _rho(old_K: Keys, new_K: Keys) -> float:
    both, _, at = np.intersect1d(old_K[old_K != MISSING], new_K, return_indices=True)
    n = len(both)
    if n < 2:
        return float("nan")
    place = {key: rank for rank, key in enumerate(old_K[np.isin(old_K, both)].tolist())}
    old_rank = np.array([place[key] for key in both.tolist()])
    new_rank = np.argsort(np.argsort(at))
    return 1.0 - 6.0 * float(((old_rank - new_rank) ** 2).sum()) / (n * (n * n - 1))
