"""Exact nearest neighbours among rows in memory (`nearest_rows`).

Shape suffixes: Q queries, D dimension, R rows, W their width, C candidates, K wanted.
"""

from __future__ import annotations

import numpy as np

from index.engines.base import MISSING
from index.scan import MAX_EXACT_QUERIES, Mask, Rows, compare, compare_chosen, scan, scan_allowed
from index.space import Lorentz, Space, Vectors

LORENTZ_BLOCK = 16_384
"""Rows whose distances are computed at a time, in float64."""
MIN_CANDIDATES, CANDIDATES_GROW = 16, 8
"""Extra candidates to score exactly if the scan is inexact, and the factor of further ones while it may still err."""


def nearest_rows(
    space: Space, queries_QD: Vectors, rows_RW: Vectors, allowed_R: Mask | None, k: int
) -> tuple[Vectors, Rows]:
    """Scores of the space (Q, K) and row numbers (Q, K), best first, then MISSING.

    Ties are in the order of their row numbers, so that a longer list begins with the shorter one: pages are cut from
    lists of different lengths.
    """
    available = len(rows_RW) if allowed_R is None else int(np.count_nonzero(allowed_R))
    found = min(k, available)
    if found == k and len(queries_QD):
        return _best_rows(space, queries_QD, rows_RW, allowed_R, k, available)
    scores_QK = np.zeros((len(queries_QD), k), np.float32)
    at_QK = np.full((len(queries_QD), k), MISSING, np.int64)
    if found and len(queries_QD):
        scores_QK[:, :found], at_QK[:, :found] = _best_rows(space, queries_QD, rows_RW, allowed_R, found, available)
    return scores_QK, at_QK


def sort_ties(scores_QK: Vectors, at_QK: Rows) -> tuple[Vectors, Rows]:
    """Sort the ties of sorted lists by row number."""
    equal_QK = scores_QK[:, 1:] == scores_QK[:, :-1]
    if not equal_QK.any():  # the usual case; finding the rows would cost twice as much
        return scores_QK, at_QK
    for query in np.flatnonzero(equal_QK.any(axis=1)).tolist():
        group_K = np.concatenate([[0], np.cumsum(scores_QK[query, 1:] != scores_QK[query, :-1])])
        last_K = np.where(at_QK[query] == MISSING, np.iinfo(np.int64).max, at_QK[query])
        at_QK[query] = at_QK[query, np.lexsort((last_K, group_K))]
    return scores_QK, at_QK


def score_rows(space: Space, queries_QD: Vectors, rows_RW: Vectors, at_QC: Rows, k: int) -> tuple[Vectors, Rows]:
    """`nearest_rows` among each query's own candidates `at_QC` (Q, C); MISSING ones are skipped."""
    scores_QK = np.zeros((len(queries_QD), k), np.float32)
    at_QK = np.full((len(queries_QD), k), MISSING, np.int64)
    queries_QW = space.queries(queries_QD)
    for number, row_QC in enumerate(at_QC):
        at_C = np.sort(row_QC[row_QC != MISSING])  # so that ties are in the order of row numbers
        candidates_CW = rows_RW[at_C]
        if isinstance(space, Lorentz):
            scores_C = space.distances(queries_QD[number], candidates_CW).astype(np.float32)
        elif space.inner_product:
            scores_C = space.score(candidates_CW @ queries_QW[number])
        else:
            scores_C = space.score(np.square(candidates_CW - queries_QW[number]).sum(axis=1))
        best = np.argsort(-scores_C if space.higher_is_better else scores_C, kind="stable")[:k]
        scores_QK[number, : len(best)], at_QK[number, : len(best)] = scores_C[best], at_C[best]
    return scores_QK, at_QK


def _best_rows(
    space: Space, queries_QD: Vectors, rows_RW: Vectors, allowed_R: Mask | None, k: int, available: int
) -> tuple[Vectors, Rows]:
    """The k best, at most `available`; scans further if the last result is tied, as a scan may drop any of the tied."""
    if k == available:
        return sort_ties(*_nearest(space, queries_QD, rows_RW, allowed_R, k))
    scores_QC, at_QC = _nearest(space, queries_QD, rows_RW, allowed_R, k + 1)
    scores_QK, at_QK = sort_ties(scores_QC[:, :k], at_QC[:, :k])
    for query in np.flatnonzero(scores_QC[:, k - 1] == scores_QC[:, k]).tolist():
        scores_R = _scores(space, queries_QD[query : query + 1], rows_RW)
        cost_R = -scores_R if space.higher_is_better else scores_R
        last = cost_R[at_QK[query]].max()
        nearer_R, equal_R = cost_R < last, cost_R == last
        if allowed_R is not None:
            nearer_R, equal_R = nearer_R & allowed_R, equal_R & allowed_R
        (nearer_N,), (equal_N,) = nearer_R.nonzero(), equal_R.nonzero()
        at_N = np.concatenate([nearer_N[np.argsort(cost_R[nearer_N], kind="stable")], equal_N[:k]])
        at_QK[query], scores_QK[query] = at_N[:k], scores_R[at_N[:k]]
    return scores_QK, at_QK


def _scores(space: Space, query_1D: Vectors, rows_RW: Vectors) -> Vectors:
    """The score of every row (R,)."""
    if isinstance(space, Lorentz):
        parts = [
            space.distances(query_1D[0], rows_RW[start : start + LORENTZ_BLOCK]).astype(np.float32)
            for start in range(0, len(rows_RW), LORENTZ_BLOCK)
        ]
        return np.concatenate(parts)
    return space.score(compare(space.queries(query_1D)[0], rows_RW, inner_product=space.inner_product))


def _nearest(
    space: Space, queries_QD: Vectors, rows_RW: Vectors, allowed_R: Mask | None, k: int
) -> tuple[Vectors, Rows]:
    if isinstance(space, Lorentz):
        return _scan_lorentz(space, queries_QD, rows_RW, allowed_R, k)
    queries_QW = space.queries(queries_QD)
    rounded = not space.inner_product and len(queries_QW) > MAX_EXACT_QUERIES
    search = _scan_l2_exactly if rounded else _scan
    scanned_QK, at_QK = search(space, queries_QW, rows_RW, allowed_R, k)
    return space.score(scanned_QK), at_QK


def _scan(space: Space, queries_QW: Vectors, rows_RW: Vectors, allowed_R: Mask | None, k: int) -> tuple[Vectors, Rows]:
    if allowed_R is None:
        return scan(queries_QW, rows_RW, k, inner_product=space.inner_product)
    return scan_allowed(queries_QW, rows_RW, allowed_R, k, inner_product=space.inner_product)


def _scan_l2_exactly(
    space: Space, queries_QW: Vectors, rows_RW: Vectors, allowed_R: Mask | None, k: int
) -> tuple[Vectors, Rows]:
    """`_scan` of many queries by squared L2, with scores recomputed from differences.

    If a row that was not found may be nearer, the query is compared with all rows by differences. The error of the scan
    is at most 4 u (W + 2) (|q|^2 + |x|^2) for width W and unit roundoff u (Higham 2002, 3.1), and the norm of a row
    that is nearer than the last of the k best is at most |q| plus the distance of that one.
    """
    count = len(rows_RW) if allowed_R is None else int(np.count_nonzero(allowed_R))
    depth = min(count, k + MIN_CANDIDATES)
    scanned_QC, at_QC = _scan(space, queries_QW, rows_RW, allowed_R, depth)
    squares_QC = compare_chosen(queries_QW, rows_RW, at_QC, inner_product=False)
    best_QK = np.argsort(squares_QC, axis=1, kind="stable")[:, :k]
    squares_QK, at_QK = np.take_along_axis(squares_QC, best_QK, axis=1), np.take_along_axis(at_QC, best_QK, axis=1)
    if depth < count:
        last_Q, length_Q = squares_QK[:, -1].astype(np.float64), np.linalg.norm(queries_QW.astype(np.float64), axis=1)
        longest_Q = length_Q + np.sqrt(last_Q)
        error_Q = 4 * 2.0**-24 * (queries_QW.shape[1] + 2) * (np.square(length_Q) + np.square(longest_Q))
        unsure = np.flatnonzero(scanned_QC[:, -1] < last_Q + error_Q)
        for start in range(0, len(unsure), MAX_EXACT_QUERIES):
            some = unsure[start : start + MAX_EXACT_QUERIES]
            squares_QK[some], at_QK[some] = _scan(space, queries_QW[some], rows_RW, allowed_R, k)
    return squares_QK, at_QK


def _scan_lorentz(
    space: Lorentz, queries_QD: Vectors, rows_RW: Vectors, allowed_R: Mask | None, k: int
) -> tuple[Vectors, Rows]:
    """The k best by exact distance, with more and more candidates until no other row can be nearer."""
    count = len(rows_RW) if allowed_R is None else int(np.count_nonzero(allowed_R))
    queries_QW = space.queries(queries_QD)
    scores_QK, at_QK = np.empty((len(queries_QD), k), np.float32), np.empty((len(queries_QD), k), np.int64)
    waiting, depth = np.arange(len(queries_QD)), min(count, k + MIN_CANDIDATES)
    while len(waiting):
        scanned, at = _scan(space, queries_QW[waiting], rows_RW, allowed_R, depth)
        left = []
        for number, row_scanned, row_at in zip(waiting.tolist(), scanned, at, strict=True):
            distances = space.distances(queries_QD[number], rows_RW[row_at])
            best = np.argsort(distances, kind="stable")[:k]
            scores_QK[number], at_QK[number] = distances[best], row_at[best]
            if depth < count and space.nearest(queries_QD[number], float(row_scanned[-1])) < distances[best[-1]]:
                left.append(number)
        waiting, depth = np.array(left, np.int64), min(count, CANDIDATES_GROW * depth)
    return scores_QK, at_QK
