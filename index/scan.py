"""Exact search over all (`scan`) or some (`scan_allowed`) rows in memory, by FAISS kernels. Stateless, no threads.

FAISS's scan with an `IDSelector` decides row by row and costs up to 2.4 times the whole scan at medium selectivity.
Here whole blocks are compared, and rows that are not allowed are dropped afterwards.

FAISS is imported where it is used, so that evaluation can import these modules on machines without it.

Shape suffixes: Q queries, R rows, W their width, K results wanted, A allowed rows, B rows of one block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from index.space import Vectors

Rows = NDArray[np.int64]
"""Row numbers; -1 where there is no result."""
Mask = NDArray[np.bool_]

MAX_EXACT_QUERIES = 16
"""For more queries FAISS may compute squared L2 as |q|^2 - 2 <q, x> + |x|^2: several times as fast, less accurate."""
GATHERED_BLOCK = 4_096
"""Rows gathered per block: 2 MB at width 128, so that they are compared while still in the CPU cache."""
MASKED_BLOCK = 65_536

NARROW = 12
"""FAISS compares narrower rows, and those of this width, with one query by kernels of their own, whose last bits differ
from those of `scan` and depend on a row's place."""

COPY_COST = 10
"""Copying a row takes about as long as comparing this many consecutive rows with one query."""


def scan(queries_QW: Vectors, rows_RW: Vectors, k: int, *, inner_product: bool) -> tuple[Vectors, Rows]:
    """The k best rows of each query, best first: scores (Q, k) and row numbers (Q, k); 1 <= k <= R.

    Scores are inner products (larger is better) or squared L2 (smaller is better). For more than MAX_EXACT_QUERIES
    queries, squared L2 between long vectors close to each other is lost to rounding, see `index.engines.exact`.
    """
    import faiss

    metric = faiss.METRIC_INNER_PRODUCT if inner_product else faiss.METRIC_L2
    found: tuple[Vectors, Rows] = faiss.knn(queries_QW, rows_RW, k, metric=metric)
    return found


def compare(query_W: Vectors, rows_RW: Vectors, *, inner_product: bool) -> Vectors:
    """Inner product or squared L2 of one query and every row (R,), bit-identical to `scan` of few queries."""
    import faiss

    if rows_RW.shape[1] <= NARROW:
        every_1R = np.arange(len(rows_RW), dtype=np.int64)[None]
        return compare_chosen(query_W[None], rows_RW, every_1R, inner_product=inner_product).ravel()
    scores_R, query_W = np.empty(len(rows_RW), np.float32), np.ascontiguousarray(query_W)
    into = getattr(faiss, "fvec_inner_products_ny" if inner_product else "fvec_L2sqr_ny")
    into(*map(faiss.swig_ptr, (scores_R, query_W, rows_RW)), rows_RW.shape[1], len(rows_RW))
    return scores_R


def compare_chosen(queries_QW: Vectors, rows_RW: Vectors, at_QC: Rows, *, inner_product: bool) -> Vectors:
    """Inner product or squared L2 of each query and its own rows `at_QC` (Q, C), bit-identical to `scan` of few."""
    import faiss

    into = getattr(faiss, "fvec_inner_products_by_idx" if inner_product else "fvec_L2sqr_by_idx")
    scores_QC, queries_QW = np.empty(at_QC.shape, np.float32), np.ascontiguousarray(queries_QW)
    pointers = [faiss.swig_ptr(array) for array in (scores_QC, queries_QW, rows_RW, at_QC)]
    into(*pointers, rows_RW.shape[1], *at_QC.shape)
    return scores_QC


def scan_allowed(
    queries_QW: Vectors, rows_RW: Vectors, allowed_R: Mask, k: int, *, inner_product: bool
) -> tuple[Vectors, Rows]:
    """`scan` over the rows that `allowed_R` marks; k is at least 1 and at most their number."""
    allowed = int(np.count_nonzero(allowed_R))
    if allowed == len(rows_RW):
        return scan(queries_QW, rows_RW, k, inner_product=inner_product)
    if allowed * COPY_COST < len(rows_RW) * len(queries_QW):
        return _scan_gathered(queries_QW, rows_RW, np.flatnonzero(allowed_R), k, inner_product)
    found = [_scan_masked(query_W, rows_RW, allowed_R, k, inner_product) for query_W in queries_QW]
    return np.concatenate([scores for scores, _ in found]), np.concatenate([at for _, at in found])


def _scan_gathered(
    queries_QW: Vectors, rows_RW: Vectors, at_A: Rows, k: int, inner_product: bool
) -> tuple[Vectors, Rows]:
    """Gather the allowed rows block by block; best for few rows or many queries."""
    import faiss

    best = faiss.ResultHeap(len(queries_QW), k, keep_max=inner_product)
    step = max(GATHERED_BLOCK, 4 * k)
    for start in range(0, len(at_A), step):
        at_B = at_A[start : start + step]
        scores, found = scan(queries_QW, rows_RW[at_B], min(k, len(at_B)), inner_product=inner_product)
        best.add_result(scores, at_B[found])
    best.finalize()
    return best.D, best.I


def _scan_masked(
    query_W: Vectors, rows_RW: Vectors, allowed_R: Mask, k: int, inner_product: bool
) -> tuple[Vectors, Rows]:
    """Compare one query with every row and keep the best allowed ones: scores and row numbers (1, k)."""
    import faiss

    best = faiss.ResultHeap(1, k, keep_max=inner_product)
    for start in range(0, len(rows_RW), MASKED_BLOCK):
        scores_B = compare(query_W, rows_RW[start : start + MASKED_BLOCK], inner_product=inner_product)
        worst = best.D[0, 0]  # the root of the heap: the worst of the k best so far
        better_B = scores_B > worst if inner_product else scores_B < worst
        at_B = np.flatnonzero(better_B & allowed_R[start : start + len(scores_B)])
        best.add_result(scores_B[None, at_B], at_B[None] + start)
    best.finalize()
    return best.D, best.I
