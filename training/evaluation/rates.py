"""Verification and open-set rates of one way to compare: TAR@FAR over pairs, TPIR@FPIR with half the classes stored.

Shape suffixes: Q queries, N items, B one block of queries.
"""

from __future__ import annotations

import numpy as np

from index.evaluation.metrics import Compared, blocks, comparable, costs
from index.evaluation.relevance import Ints, LabelRelevance
from index.evaluation.verification import best_scores, tar_at_far, tpir_at_fpir
from index.space import Vectors

FARS = (1e-2, 1e-3)
FPIRS = (1e-1, 1e-2)
PAIRS = 5_000_000
"""So many pairs of one identity, and of two, are scored at most; beyond, a random share of them."""

COLUMNS = tuple(f"TAR@FAR={far:g}" for far in FARS) + tuple(f"TPIR@FPIR={fpir:g}" for fpir in FPIRS)


def verification_rates(compared: Compared, relevance: LabelRelevance) -> dict[str, float]:
    """The `COLUMNS`, each in [0, 1]; NaN where the data set has no pair, or no query, of one of the two kinds.

    Where queries and items are the same images, a random half of them stands for each side, so that no image meets
    itself. TPIR: items of a random half of the classes are stored, queries of the others should find nothing (rank 1).
    """
    generator = np.random.default_rng(0)
    query_N, item_N = _disjoint(relevance, generator)
    queries_QD, items_ND = compared.queries[query_N], compared.items[item_N]
    query_codes, item_codes = relevance.query_codes[query_N], relevance.item_codes[item_N]
    score, same = _pairs(Compared(queries_QD, items_ND, compared.space), query_codes, item_codes, generator)
    tar = tar_at_far(score, same, FARS) if 0 < same.sum() < len(same) else np.full(len(FARS), np.nan)
    classes = generator.permutation(np.unique(item_codes))
    stored_N = np.isin(item_codes, classes[: (len(classes) + 1) // 2])
    own_Q, other_Q = best_scores(queries_QD, query_codes, items_ND[stored_N], item_codes[stored_N], compared.space)
    known = np.isfinite(own_Q)
    tpir = tpir_at_fpir(own_Q, other_Q, FPIRS) if 0 < known.sum() < len(known) else np.full(len(FPIRS), np.nan)
    return dict(zip(COLUMNS, [float(rate) for rate in (*tar, *tpir)], strict=True))


def _disjoint(relevance: LabelRelevance, generator: np.random.Generator) -> tuple[Ints, Ints]:
    """Rows of the queries and of the items to use: no image on both sides."""
    if (relevance.self_Q < 0).all():
        return np.arange(len(relevance.query_codes)), np.arange(len(relevance.item_codes))
    order = generator.permutation(len(relevance.query_codes))
    queries, items = np.sort(order[: len(order) // 2]), np.sort(order[len(order) // 2 :])
    return queries, relevance.self_Q[items]


def _pairs(
    compared: Compared, query_codes: Ints, item_codes: Ints, generator: np.random.Generator
) -> tuple[Vectors, Vectors]:
    """Scores of pairs, higher for more alike, and whether each shows one class."""
    queries, items = comparable(compared)
    count = np.bincount(item_codes, minlength=int(query_codes.max()) + 1)
    same_total = int(count[query_codes].sum())
    share = np.minimum(1.0, PAIRS / np.maximum([len(queries) * len(items) - same_total, same_total], 1))
    scores, answers = [], []
    for rows in blocks(len(queries), len(items)):
        same_BN = query_codes[rows, None] == item_codes
        kept_BN = generator.random(same_BN.shape, np.float32) < share[same_BN.astype(int)]
        scores.append(-costs(queries[rows], items, compared.space)[kept_BN])
        answers.append(same_BN[kept_BN])
    return np.concatenate(scores), np.concatenate(answers)
