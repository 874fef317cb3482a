"""The compatibility criterion in its strict form: constraints on every pair, not on an average.

BCT (Shen 2020, arXiv 2003.11942, eq. 1 and 2) asks of a new model that each new query is at least as near as the old
one to every old item of its class, and at least as far from every other; it calls the average form (M(new/old) >
M(old/old)) the practical one, since no training holds all pairs.

Shape suffixes: Q queries, N items, B one block of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from index.evaluation.metrics import Compared, blocks, comparable, costs
from index.evaluation.relevance import LabelRelevance


@dataclass(frozen=True)
class Strict:
    """Shares of the pairs whose constraint holds, each in [0, 1]; NaN without a pair of the kind.

    Attributes:
        same: of pairs of one class.
        other: of pairs of two.
    """

    same: float
    other: float


def strict_criterion(before: Compared, after: Compared, relevance: LabelRelevance) -> Strict | None:
    """How many pairwise constraints a new version holds: `before` old queries, `after` new ones, the same items.

    An image never meets itself. A tie holds. None where items moved (a forward edge): scores of two spaces cannot be
    held against each other.
    """
    if after.items is not before.items:
        return None
    old_queries, old_items = comparable(before)
    new_queries, new_items = comparable(after)
    held, pairs = np.zeros(2), np.zeros(2)
    for rows in blocks(len(old_queries), len(old_items)):
        old_BN = costs(old_queries[rows], old_items, before.space)
        new_BN = costs(new_queries[rows], new_items, after.space)
        same_BN = relevance.query_codes[rows, None] == relevance.item_codes
        itself_BN = relevance.self_Q[rows, None] == np.arange(len(old_items))
        for kind, (asked_BN, holds_BN) in enumerate(
            ((same_BN & ~itself_BN, new_BN <= old_BN), (~same_BN, new_BN >= old_BN))
        ):
            pairs[kind] += asked_BN.sum()
            held[kind] += (asked_BN & holds_BN).sum()
    same, other = np.divide(held, pairs, out=np.full(2, np.nan), where=pairs > 0)
    return Strict(float(same), float(other))
