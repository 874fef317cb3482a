"""64-bit digests of vectors, to check whether a stored row is the vector in the database.

Multilinear hashing (Carter and Wegman 1979; Lemire and Kaser 2014): the sum of the words of a vector, each times a
random 64-bit number, modulo 2^64; a digest is the upper halves of two such sums. Any two different vectors have the
same digest with probability 2^-64. NumPy computes millions per second; hashlib would need a call for each.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from index.engines.base import Keys
from index.space import Vectors

UNKNOWN = 0
"""Stands for a digest that is not stored; never equal to a digest."""
BLOCK = 1024
"""Rows widened to 64 bits at a time, so that they stay in the CPU cache."""
SEED = 0x5265_6772_6166_74


def digests(vectors_ND: Vectors) -> Keys:
    """The digest (N,) of each row, as little-endian float32."""
    factors_2D, half = _factors(vectors_ND.shape[1]), np.uint64(32)
    found_N = np.empty(len(vectors_ND), np.uint64)
    for start in range(0, len(vectors_ND), BLOCK):
        block_ND = np.ascontiguousarray(vectors_ND[start : start + BLOCK], "<f4").view("<u4").astype(np.uint64)
        upper, lower = np.einsum("nd,sd->sn", block_ND, factors_2D)
        found_N[start : start + BLOCK] = (upper >> half) << half | lower >> half
    return found_N.view(np.int64)


@lru_cache
def _factors(dim: int) -> NDArray[np.uint64]:
    # The stream of a bit generator is the same in all releases of NumPy; a longer vector uses more of it.
    return np.random.PCG64(SEED).random_raw(2 * dim).reshape(dim, 2).T.copy()
