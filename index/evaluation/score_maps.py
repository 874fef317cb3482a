"""Fit the score maps (`index.edges.calibration`) of several shards that rank together (`fit_maps`).

If all scores are of one kind of space, raw scores are comparable too, and the labels of few queries are weak evidence
against that. So each map is shrunk towards one common map of all pairs, which ranks as raw scores do, with the weight
of FEW queries.

Shape suffixes: Q queries, N items, S pairs drawn, B one block of queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from index.edges.calibration import Calibration, blend, fit_calibration
from index.errors import InvalidArgument
from index.evaluation.evalue_calibration import fit_evalue
from index.evaluation.metrics import Compared, blocks, comparable, costs, leave_out, scores_of
from index.evaluation.relevance import Relevance
from index.space import Space

BEST = 100
DRAWN = 100
"""A map is fitted on the BEST best items of each query and on DRAWN random others, weighted to represent all others."""
FITTING_QUERIES = 1_000
EVALUE_PAIRS = 20_000
"""Approximate number of random pairs to fit a map without labels."""
FEW = 20
"""Weight of the common map, in queries."""

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Table = NDArray[np.float32]

ScoredPairs = tuple[Table, Bools, Floats]
"""Scores, relevance and weights (S,) of pairs of a query and an item that a map is fitted on."""


def fit_maps(shards: Sequence[Compared], relevance: Relevance, rows: Ints, seed: int = 0) -> list[Calibration]:
    """Fit one score map per shard on these queries (`rows`), at most FITTING_QUERIES of them.

    Raises:
        InvalidArgument: no query, or no item.
    """
    pairs = [_best_and_drawn(shard, relevance, rows, seed) for shard in shards]
    made = [_fit(known, shard.space) for known, shard in zip(pairs, shards, strict=True)]
    if len(shards) < 2 or len({shard.space.kind for shard in shards}) > 1:
        return made
    every = [np.concatenate(part) for part in zip(*pairs, strict=True)]
    common = _fit((every[0], every[1], every[2]), shards[0].space)
    return [blend(own, common, FEW / (FEW + min(len(rows), FITTING_QUERIES))) for own in made]


def fit_evalue_maps(shards: Sequence[Compared], relevance: Relevance, rows: Ints, seed: int = 0) -> list[Calibration]:
    """Fit maps by `evalue_calibration` on these queries, each with equally many random items, never its own image.

    Raises:
        InvalidArgument: no query, or no item.
    """
    made = []
    for shard in shards:
        scores = _random_scores(shard, relevance, rows, seed)
        made.append(fit_evalue(scores, len(shard.items), higher_is_better=shard.space.higher_is_better))
    return made


def _fit(pairs: ScoredPairs, space: Space) -> Calibration:
    score_S, relevant_S, weight_S = pairs
    return fit_calibration(score_S, relevant_S, higher_is_better=space.higher_is_better, weights=weight_S)


def _best_and_drawn(shard: Compared, relevance: Relevance, rows: Ints, seed: int) -> ScoredPairs:
    """The pairs of each query with its best items, and with random others."""
    generator = np.random.default_rng(seed)
    rows = rows if len(rows) <= FITTING_QUERIES else generator.choice(rows, FITTING_QUERIES, replace=False)
    drawn = [_draw_pairs(cost_BN, relevant_BN, generator) for cost_BN, relevant_BN in _costs(shard, relevance, rows)]
    cost_S, relevant_S, weight_S = (np.concatenate(part) for part in zip(*drawn, strict=True))
    return scores_of(cost_S, shard.space), relevant_S, weight_S


def _random_scores(shard: Compared, relevance: Relevance, rows: Ints, seed: int) -> Table:
    generator = np.random.default_rng(seed)
    each = -(-EVALUE_PAIRS // max(len(rows), 1))
    drawn = [
        np.take_along_axis(cost_BN, generator.integers(len(shard.items), size=(len(cost_BN), each)), axis=1).ravel()
        for cost_BN, _ in _costs(shard, relevance, rows)
    ]
    cost_S = np.concatenate(drawn)
    return scores_of(cost_S[np.isfinite(cost_S)], shard.space)


def _costs(shard: Compared, relevance: Relevance, rows: Ints) -> Iterator[tuple[Table, Bools]]:
    """For each block of queries: costs (B, N), infinite for a query's own image, and relevance (B, N)."""
    if not (len(rows) and len(shard.items)):
        raise InvalidArgument("score maps are fitted on at least one query and one item")
    queries, items = comparable(shard)
    for block in blocks(len(rows), len(items)):
        some, relevant_BN = rows[block], relevance.relevant(rows[block])
        cost_BN = costs(queries[some], items, shard.space)
        leave_out(relevance.self_Q[some], cost_BN, relevant_BN)
        yield cost_BN, relevant_BN


def _draw_pairs(cost_BN: Table, relevant_BN: Bools, generator: np.random.Generator) -> tuple[Table, Bools, Floats]:
    """Costs, relevance and weights (S,) of the pairs of a block that a map is fitted on."""
    items = cost_BN.shape[1]
    if items <= BEST + DRAWN:
        column_BS = np.broadcast_to(np.arange(items), cost_BN.shape)
        weight_BS = np.ones(cost_BN.shape)
    else:
        best_BN = np.argpartition(cost_BN, BEST, axis=1)
        rest = BEST + generator.integers(items - BEST, size=(len(cost_BN), DRAWN))
        column_BS = np.hstack([best_BN[:, :BEST], np.take_along_axis(best_BN, rest, axis=1)])
        weight_BS = np.broadcast_to(np.repeat([1.0, (items - BEST) / DRAWN], [BEST, DRAWN]), column_BS.shape)
    cost_BS = np.take_along_axis(cost_BN, column_BS, axis=1)
    relevant_BS = np.take_along_axis(relevant_BN, column_BS, axis=1)
    kept = np.isfinite(cost_BS)  # all but a query's own image
    return cost_BS[kept], relevant_BS[kept], weight_BS[kept]
