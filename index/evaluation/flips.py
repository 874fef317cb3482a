"""List negative flips (`worst_flips`): queries that a new version gets wrong, and what it finds first instead.

Shape suffixes: Q queries, N items, B one block of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from index.evaluation.gate import Measured
from index.evaluation.measures import FIRST
from index.evaluation.metrics import Compared, blocks, comparable, costs, leave_out
from index.evaluation.relevance import Relevance


@dataclass(frozen=True)
class Flip:
    """A query whose first match is relevant under old/old but not under new/old.

    Attributes:
        query: number of the query.
        wrong: number of its first match under new/old.
        rank: rank of its first relevant item under new/old, at least 2; it was 1 under old/old.
    """

    query: int
    wrong: int
    rank: int


def worst_flips(old_old: Measured, new_old: Measured, shard: Compared, relevance: Relevance, most: int) -> list[Flip]:
    """At most `most` of the negative flips that a gate counts, largest `rank` first.

    Args:
        old_old: result of the old version's queries, with `cmc@1`.
        new_old: result of the new version's queries over the same items.
        shard: queries and items of `new_old`.
        relevance: the relevant items of each query.
        most: largest number of flips, at least 0.
    """
    lost_Q = (old_old.per_query(FIRST) > 0) & (new_old.per_query(FIRST) == 0) & old_old.valid & new_old.valid
    flipped = np.flatnonzero(lost_Q)
    queries, items = comparable(shard)
    found: list[Flip] = []
    for block in blocks(len(flipped), len(items)):
        some = flipped[block]
        cost_BN, relevant_BN = costs(queries[some], items, shard.space), relevance.relevant(some)
        leave_out(relevance.self_Q[some], cost_BN, relevant_BN)
        wrong_BN = np.where(relevant_BN, np.inf, cost_BN)
        # As in counting flips, irrelevant items of equal cost come first.
        best_B = np.where(relevant_BN, cost_BN, np.inf).min(axis=1)
        rank_B = 1 + (wrong_BN <= best_B[:, None]).sum(axis=1)
        found += map(Flip, some.tolist(), wrong_BN.argmin(axis=1).tolist(), rank_B.tolist())
        found = sorted(found, key=lambda flip: (-flip.rank, flip.query))[:most]
    return found
