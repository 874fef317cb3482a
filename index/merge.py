"""Many shard results -> one ranked list. Pure functions over arrays.

Shape suffixes: Q queries, K results wanted, S the results of all shards side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from index.shard import MISSING, Keys
from index.space import Vectors


def merge_raw(
    found: Sequence[tuple[Vectors, Keys]], higher_is_better: Sequence[bool], k: int
) -> tuple[Vectors, Keys, NDArray[np.int64]]:
    """Order the results of several shards by their raw scores.

    Args:
        found: per shard the scores (Q, k) and keys (Q, k) of `Shard.search`, padded with MISSING.
        higher_is_better: per shard, the order of its space.
        k: how many to keep.

    Returns:
        Scores (Q, K), keys (Q, K) and the number of the shard each came from (Q, K), best first; rows with fewer
        results than k are padded with MISSING keys and shard -1.
    """
    keys_QS = np.concatenate([keys for _, keys in found], axis=1)
    scores_QS = np.concatenate([scores for scores, _ in found], axis=1)
    shard_S = np.repeat(np.arange(len(found)), [keys.shape[1] for _, keys in found])
    sign_S = np.where(np.asarray(higher_is_better), -1.0, 1.0)[shard_S]
    cost_QS = np.where(keys_QS == MISSING, np.inf, scores_QS * sign_S)
    # Stable, so that equal scores keep the order of the shards and of their own results.
    order_QK = np.argsort(cost_QS, axis=1, kind="stable")[:, :k]
    keys_QK = np.take_along_axis(keys_QS, order_QK, axis=1)
    shards_QK = np.where(keys_QK == MISSING, -1, shard_S[order_QK])
    return np.take_along_axis(scores_QS, order_QK, axis=1), keys_QK, shards_QK
