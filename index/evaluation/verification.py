"""Verification (are two inputs of one identity?) and open-set identification (which stored identity, if any?).

Higher scores mean more similar. Shape suffixes: P pairs, Q queries, N items, B one block of queries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.errors import InvalidArgument
from index.evaluation.metrics import Compared, blocks, comparable, costs
from index.space import Space, Vectors

Floats = NDArray[np.float64]


def tar_at_far(scores: ArrayLike, same: ArrayLike, fars: ArrayLike, *, interp: bool = False) -> Floats:
    """Verification: true accept rate at each false accept rate.

    Args:
        scores: (P,) scores of pairs, higher means more similar.
        same: (P,) whether a pair is of one identity.
        fars: targets in [0, 1].
        interp: False takes the threshold with the largest FAR that does not exceed the target; True interpolates the
            ROC curve linearly.
    """
    scores_P, same_P = np.asarray(scores, np.float64), np.asarray(same, bool)
    genuine, impostor = scores_P[same_P], scores_P[~same_P]
    if not interp:
        return _accepted(genuine, impostor, fars)
    thresholds = np.unique(scores_P)[::-1]
    far, tar = (np.concatenate([[0.0], _share_from(side, thresholds)]) for side in (impostor, genuine))
    return np.asarray(np.interp(np.asarray(fars, np.float64), far, tar))


def best_scores(
    queries_QD: Vectors, query_labels: ArrayLike, items_ND: Vectors, item_labels: ArrayLike, space: Space
) -> tuple[Floats, Floats]:
    """Best score of each query among items of its class, and among all others: the input of `tpir_at_fpir`.

    Returns:
        (Q,) and (Q,), higher is better in every space; -inf if there is no such item.
    """
    queries, items = comparable(Compared(queries_QD, items_ND, space))
    query_classes, item_classes = np.asarray(query_labels), np.asarray(item_labels)
    own_Q, other_Q = np.full(len(queries), -np.inf), np.full(len(queries), -np.inf)
    for rows in blocks(len(queries), len(items)):
        score_BN = -costs(queries[rows], items, space)
        own_BN = query_classes[rows, None] == item_classes
        own_Q[rows] = np.where(own_BN, score_BN, -np.inf).max(axis=1, initial=-np.inf)
        other_Q[rows] = np.where(own_BN, -np.inf, score_BN).max(axis=1, initial=-np.inf)
    return own_Q, other_Q


def tpir_at_fpir(own_Q: Floats, other_Q: Floats, fpirs: ArrayLike, *, any_rank: bool = False) -> Floats:
    """Open-set identification: true positive identification rate at each false positive one.

    Args:
        own_Q: best score among items of the query's identity; -inf if its identity is not stored.
        other_Q: best score among all other items.
        fpirs: targets in [0, 1]: the share of queries without stored identity whose best score passes the threshold.
        any_rank: True: a query counts if its own item passes the threshold at any rank; False: only at rank 1.
    """
    stored_Q = np.isfinite(own_Q)
    found = own_Q[stored_Q]
    if not any_rank:
        found = np.where(found > other_Q[stored_Q], found, -np.inf)
    return _accepted(found, other_Q[~stored_Q], fpirs)


def _accepted(genuine: Floats, impostor: Floats, targets: ArrayLike) -> Floats:
    """Share of `genuine` above the lowest threshold that at most the target share of `impostor` passes."""
    if not len(genuine) or not len(impostor):
        raise InvalidArgument("a rate needs scores on both sides: same and different identity")
    falling = np.sort(impostor)[::-1]
    passing = np.floor(np.asarray(targets, np.float64) * len(falling) + 1e-9).astype(np.int64)
    barrier = np.concatenate([falling, [-np.inf]])[np.minimum(passing, len(falling))]
    return 1.0 - np.searchsorted(np.sort(genuine), barrier, side="right") / len(genuine)


def _share_from(scores: Floats, thresholds: Floats) -> Floats:
    """Share of scores at or above each threshold: a quotient, so that 3 of 10 is the 0.3 that a caller writes."""
    return (len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left")) / len(scores)
