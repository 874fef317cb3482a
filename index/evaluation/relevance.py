"""Relevant items of queries: by class, by lists, or by a reference ranking.

Shape suffixes: Q queries, N items, K listed items, B one block of queries.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from index.evaluation.metrics import Compared, Retrieval, blocks, comparable, costs, joined, leave_out, ranked

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ListedRelevance:
    """The listed items of each query are relevant: `relevant_QK`, padded with -1; `items` is N."""

    relevant_QK: Ints
    items: int
    self_Q: Ints

    @property
    def valid(self) -> Bools:
        """Whether each query (Q,) has a relevant item."""
        return np.asarray((self.relevant_QK >= 0).any(axis=1))

    def relevant(self, rows: slice | Ints) -> Bools:
        """(B, N) for a block of queries."""
        listed_BK = self.relevant_QK[rows]
        # One more column, the last, for the -1 entries.
        found_BN = np.zeros((len(listed_BK), self.items + 1), bool)
        np.put_along_axis(found_BN, listed_BK, True, axis=1)
        return found_BN[:, :-1]


@dataclass(frozen=True)
class RankingRelevance(ListedRelevance):
    """The first K items of a reference ranking are relevant."""

    @property
    def valid(self) -> Bools:
        """Every query has relevant items, also if K is 0."""
        return np.ones(len(self.relevant_QK), bool)


@dataclass(frozen=True)
class LabelRelevance:
    """Items of the query's class are relevant.

    Attributes:
        query_codes, item_codes: (Q,), (N,) classes.
        self_Q: (Q,) the item that is the same image as the query, -1 if none.
    """

    query_codes: Ints
    item_codes: Ints
    self_Q: Ints

    @property
    def valid(self) -> Bools:
        """Whether each query (Q,) has a relevant item besides itself."""
        if not len(self.item_codes):
            return np.zeros(len(self.query_codes), bool)
        classes, count = np.unique(self.item_codes, return_counts=True)
        at_Q = np.minimum(np.searchsorted(classes, self.query_codes), len(classes) - 1)
        count_Q = np.where(classes[at_Q] == self.query_codes, count[at_Q], 0)
        return np.asarray(count_Q > (self.self_Q >= 0))

    def relevant(self, rows: slice | Ints) -> Bools:
        """Relevance (B, N) for a block of queries; includes a query's own image, see `leave_out`."""
        return np.asarray(self.query_codes[rows, None] == self.item_codes)


Relevance = LabelRelevance | ListedRelevance
"""The relevant items of Q queries among N items, by class or by list."""


def label_codes(labels: Iterable[Hashable]) -> Ints:
    """The labels as small integers, equal for equal labels.

    An array of texts would give each of them the room of the longest.
    """
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)


def retrieval_by(shard: Compared, relevance: Relevance) -> Retrieval:
    """Rank all items for each query and measure CMC@1, CMC@5 and average precision, for any kind of relevance."""
    queries, items = comparable(shard)
    parts = []
    for rows in blocks(len(queries), len(items)):
        cost_BN, relevant_BN = costs(queries[rows], items, shard.space), relevance.relevant(rows)
        leave_out(relevance.self_Q[rows], cost_BN, relevant_BN)
        parts.append(ranked(cost_BN, relevant_BN))
    return joined(parts)
