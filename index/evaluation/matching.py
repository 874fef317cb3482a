"""Which items are right for which queries, and the score maps that measured pairs give.

Maps that will rank together are fitted together. Where the scores of all ways are of one kind of space, raw scores rank
them too, and the labels of few queries say little against that: each map is drawn towards the one map of all pairs, by
which the list ranks as by raw scores, as if FEW queries had been seen that speak for it.

Shape suffixes: Q queries, N items, S pairs drawn, B one block of queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from index.calibration import Calibration, blend, fit_calibration
from index.errors import InvalidArgument
from index.evaluation.evalue_calibration import fit_evalue
from index.evaluation.metrics import Compared, Retrieval, blocks, comparable, costs, joined, leave_out, ranked
from index.space import Lorentz, Space

SURE, DRAWN = 100, 100
"""A map is fitted on each query's best so many items, and on so many drawn from the rest, which stand for all of it."""
FITTING_QUERIES = 1_000
EVALUE_PAIRS = 20_000
"""About so many random pairs make a map without labels."""
FEW = 20
"""Queries that the likeness of raw scores is worth."""

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Table = NDArray[np.float32]

ScoredPairs = tuple[Table, Bools, Floats]
"""Scores, rightness and weights (S,) of pairs of a query and an item that a map is fitted on."""


@dataclass(frozen=True)
class Listed:
    """Items listed for each query are right: `right_QK`, -1 where they are fewer than K; `items` is N."""

    right_QK: Ints
    items: int
    self_Q: Ints

    @property
    def valid(self) -> Bools:
        """(Q,) whether a query has any right item."""
        return np.asarray((self.right_QK >= 0).any(axis=1))

    def relevant(self, rows: slice | Ints) -> Bools:
        """(B, N) for a block of queries."""
        right_BK = self.right_QK[rows]
        # One column more, the last, for those that are none.
        found_BN = np.zeros((len(right_BK), self.items + 1), bool)
        np.put_along_axis(found_BN, right_BK, True, axis=1)
        return found_BN[:, :-1]


@dataclass(frozen=True)
class Nearest(Listed):
    """The first K items of a ranking that is taken for the truth are right."""

    @property
    def valid(self) -> Bools:
        """Every query has right items, also where nobody asks which."""
        return np.ones(len(self.right_QK), bool)


@dataclass(frozen=True)
class Matching:
    """Which items are right for which queries.

    Attributes:
        query_codes, item_codes: (Q,), (N,) classes.
        self_Q: (Q,) the item that is the same image as the query, -1 without one.
    """

    query_codes: Ints
    item_codes: Ints
    self_Q: Ints

    @property
    def valid(self) -> Bools:
        """(Q,) whether a query has any right item but itself."""
        if not len(self.item_codes):
            return np.zeros(len(self.query_codes), bool)
        classes, count = np.unique(self.item_codes, return_counts=True)
        at_Q = np.minimum(np.searchsorted(classes, self.query_codes), len(classes) - 1)
        right_Q = np.where(classes[at_Q] == self.query_codes, count[at_Q], 0)
        return np.asarray(right_Q > (self.self_Q >= 0))

    def relevant(self, rows: slice | Ints) -> Bools:
        """(B, N) for a block of queries; a query's own image still counts, see `leave_out`."""
        return np.asarray(self.query_codes[rows, None] == self.item_codes)


Right = Matching | Listed
"""What is right for Q queries among N items: by classes, or one by one."""


def retrieval_by(shard: Compared, right: Right, ks: Sequence[int] = (1, 5)) -> Retrieval:
    """Rank all items for each query and measure CMC@k and average precision, whatever says what is right."""
    queries, items = comparable(shard)
    parts = []
    for rows in blocks(len(queries), len(items)):
        cost_BN, relevant_BN = costs(queries[rows], items, shard.space), right.relevant(rows)
        leave_out(right.self_Q[rows], cost_BN, relevant_BN)
        parts.append(ranked(cost_BN, relevant_BN, ks))
    return joined(parts, ks)


def fit_maps(shards: Sequence[Compared], right: Right, rows: Ints, seed: int = 0) -> list[Calibration]:
    """Fit the score maps of ways to compare that rank together, on these queries: at most FITTING_QUERIES of them.

    Raises:
        InvalidArgument: no query, or no item.
    """
    pairs = [_best_and_drawn(shard, right, rows, seed) for shard in shards]
    made = [_fit(known, shard.space) for known, shard in zip(pairs, shards, strict=True)]
    if len(shards) < 2 or len({shard.space.kind for shard in shards}) > 1:
        return made
    every = [np.concatenate(part) for part in zip(*pairs, strict=True)]
    common = _fit((every[0], every[1], every[2]), shards[0].space)
    return [blend(own, common, FEW / (FEW + min(len(rows), FITTING_QUERIES))) for own in made]


def fit_evalue_maps(shards: Sequence[Compared], right: Right, rows: Ints, seed: int = 0) -> list[Calibration]:
    """The maps of `evalue_calibration` from these queries, each beside as many random items, never its own image.

    Raises:
        InvalidArgument: no query, or no item.
    """
    made = []
    for shard in shards:
        scores = _random_scores(shard, right, rows, seed)
        made.append(fit_evalue(scores, len(shard.items), higher_is_better=shard.space.higher_is_better))
    return made


def _fit(pairs: ScoredPairs, space: Space) -> Calibration:
    score_S, right_S, weight_S = pairs
    return fit_calibration(score_S, right_S, higher_is_better=space.higher_is_better, weights=weight_S)


def _best_and_drawn(shard: Compared, right: Right, rows: Ints, seed: int) -> ScoredPairs:
    """Each query's best items, and some drawn to stand for the rest."""
    generator = np.random.default_rng(seed)
    rows = rows if len(rows) <= FITTING_QUERIES else generator.choice(rows, FITTING_QUERIES, replace=False)
    drawn = [_draw_pairs(cost_BN, right_BN, generator) for cost_BN, right_BN in _costs(shard, right, rows)]
    cost_S, right_S, weight_S = (np.concatenate(part) for part in zip(*drawn, strict=True))
    return read_scores(cost_S, shard.space), right_S, weight_S


def _random_scores(shard: Compared, right: Right, rows: Ints, seed: int) -> Table:
    generator = np.random.default_rng(seed)
    each = -(-EVALUE_PAIRS // max(len(rows), 1))
    drawn = [
        np.take_along_axis(cost_BN, generator.integers(len(shard.items), size=(len(cost_BN), each)), axis=1).ravel()
        for cost_BN, _ in _costs(shard, right, rows)
    ]
    cost_S = np.concatenate(drawn)
    return read_scores(cost_S[np.isfinite(cost_S)], shard.space)


def _costs(shard: Compared, right: Right, rows: Ints) -> Iterator[tuple[Table, Bools]]:
    """Blocks of the queries: costs (B, N), a query's own image infinitely far, and what is right."""
    if not (len(rows) and len(shard.items)):
        raise InvalidArgument("score maps are fitted on at least one query and one item")
    queries, items = comparable(shard)
    for block in blocks(len(rows), len(items)):
        some, relevant_BN = rows[block], right.relevant(rows[block])
        cost_BN = costs(queries[some], items, shard.space)
        leave_out(right.self_Q[some], cost_BN, relevant_BN)
        yield cost_BN, relevant_BN


def read_scores(cost: Table, space: Space) -> Table:
    """From what is ranked by to the score a user reads."""
    if isinstance(space, Lorentz):
        return cost
    return space.score(-cost if space.inner_product else cost)


def _draw_pairs(cost_BN: Table, relevant_BN: Bools, generator: np.random.Generator) -> tuple[Table, Bools, Floats]:
    """Cost, rightness and weight of the pairs of a block that a map is fitted on."""
    items = cost_BN.shape[1]
    if items <= SURE + DRAWN:
        column_BS, weight_BS = np.broadcast_to(np.arange(items), cost_BN.shape), np.ones(cost_BN.shape)
    else:
        best_BN = np.argpartition(cost_BN, SURE, axis=1)
        rest = SURE + generator.integers(items - SURE, size=(len(cost_BN), DRAWN))
        column_BS = np.hstack([best_BN[:, :SURE], np.take_along_axis(best_BN, rest, axis=1)])
        weight_BS = np.broadcast_to(np.repeat([1.0, (items - SURE) / DRAWN], [SURE, DRAWN]), column_BS.shape)
    cost_BS, right_BS = (
        np.take_along_axis(cost_BN, column_BS, axis=1),
        np.take_along_axis(relevant_BN, column_BS, axis=1),
    )
    kept = np.isfinite(cost_BS)  # all but a query's own image
    return cost_BS[kept], right_BS[kept], weight_BS[kept]
