"""Which items are right for which queries, and the score map that measured pairs give.

Shape suffixes: Q queries, N items, S pairs drawn, B one block of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from index.calibration import Calibration, fit_calibration
from index.evaluation import Compared, blocks, comparable, costs, leave_out
from index.space import Space

SURE, DRAWN = 100, 100
"""A map is fitted on each query's best so many items, and on so many drawn from the rest, which stand for all of it."""
FITTING_QUERIES = 1_000

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Table = NDArray[np.float32]


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
        classes, count = np.unique(self.item_codes, return_counts=True)
        at_Q = np.minimum(np.searchsorted(classes, self.query_codes), len(classes) - 1)
        right_Q = np.where(classes[at_Q] == self.query_codes, count[at_Q], 0)
        return np.asarray(right_Q > (self.self_Q >= 0))

    def relevant(self, rows: slice | Ints) -> Bools:
        """(B, N) for a block of queries; a query's own image still counts, see `leave_out`."""
        return np.asarray(self.query_codes[rows, None] == self.item_codes)


def fit_map(side: Compared, matching: Matching, rows: Ints, seed: int = 0) -> Calibration:
    """Fit the score map of one way to compare, on these queries: at most FITTING_QUERIES of them.

    Raises:
        InvalidArgument: no query, or no item.
    """
    generator = np.random.default_rng(seed)
    rows = rows if len(rows) <= FITTING_QUERIES else generator.choice(rows, FITTING_QUERIES, replace=False)
    queries, items = comparable(side)
    drawn = []
    for block in blocks(len(rows), len(items)):
        some, relevant_BN = rows[block], matching.relevant(rows[block])
        cost_BN = costs(queries[some], items, side.space)
        leave_out(matching.self_Q[some], cost_BN, relevant_BN)
        drawn.append(_draw_pairs(cost_BN, relevant_BN, generator))
    cost_S, right_S, weight_S = (np.concatenate(part) for part in zip(*drawn, strict=True))
    score_S = read_scores(cost_S, side.space)
    return fit_calibration(score_S, right_S, higher_is_better=side.space.higher_is_better, weights=weight_S)


def read_scores(cost: Table, space: Space) -> Table:
    """From what is ranked by to the score a user reads."""
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
