"""Metrics of retrieval and of compatibility, on numpy alone (docs/methods.md, "Metrics").

M(a/b) means queries by model a, items by model b. Shape suffixes: Q queries, N items, K ranks, D dimension, W stored
width, B one block of queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.errors import InvalidArgument
from index.space import Lorentz, Space, Vectors
from index.version import Score

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MEAN_AP = "mAP@1.0"
KS = (1, 5)
"""The k of CMC@k by default."""
BLOCK_SCORES = 4_000_000
"""Scores per block by default: about 100 MB with their sort keys, whatever the number of items."""


@dataclass(frozen=True)
class Compared:
    """Items of one version, and all queries in its space (embedded, or transformed along a route).

    Attributes:
        queries: (Q, D).
        items: (N, D), valid in `space`; N may be 0.
        space: the space. Raw scores of several shards only rank together if their spaces are of one kind.
    """

    queries: Vectors
    items: Vectors
    space: Space


@dataclass(frozen=True)
class Retrieval:
    """The result of each query.

    Attributes:
        hits: k -> (Q,) whether a relevant item is among the first k.
        ap: (Q,) non-interpolated average precision over the full ranking, in [0, 1].
        valid: (Q,) False for a query without relevant items, which is skipped and not a miss.
        decisive: whether an interval can be trusted, see `measures.PerQuery`.
    """

    hits: Mapping[int, Bools]
    ap: Floats
    valid: Bools
    decisive: ClassVar[bool] = True

    @property
    def skipped(self) -> int:
        """Number of queries without a relevant item."""
        return int((~self.valid).sum())

    def per_query(self, metric: str) -> Floats:
        """The (Q,) values whose mean over valid queries is `metric`: "cmc@<k>" for a measured k, or "mAP@1.0"."""
        values = {MEAN_AP: self.ap, **{f"cmc@{k}": hit.astype(np.float64) for k, hit in self.hits.items()}}
        if metric not in values:
            raise InvalidArgument(f"metric must be one of {', '.join(values)}, not {metric!r}", pointer="/metric")
        return values[metric]

    def resampled(self, metric: str) -> Floats:
        """The (Q,) values to resample for an interval: those of `per_query`, since no query acts on another's."""
        return self.per_query(metric)

    def mean(self, metric: str) -> float:
        """The metric over valid queries, in [0, 1]; NaN without any."""
        return _mean(self.per_query(metric)[self.valid])

    def cmc(self, k: int) -> float:
        """CMC@k: share of valid queries with a relevant item among the first k."""
        return self.mean(f"cmc@{k}")

    def interval(self, metric: str, seed: int = 0) -> Score:
        """The metric with its bootstrap interval over queries."""
        return mean_interval(self.per_query(metric)[self.valid], seed)


def retrieval(
    queries_QD: Vectors,
    query_labels: ArrayLike,
    items_ND: Vectors,
    item_labels: ArrayLike,
    space: Space,
    *,
    remove_self: ArrayLike | None = None,
    ks: Sequence[int] = KS,
    block: int | None = None,
) -> Retrieval:
    """Rank all items for each query and measure CMC@k and average precision; see `mixed_retrieval`."""
    shard = Compared(queries_QD, items_ND, space)
    return mixed_retrieval([shard], query_labels, item_labels, remove_self=remove_self, ks=ks, block=block)


def mixed_retrieval(
    shards: Sequence[Compared],
    query_labels: ArrayLike,
    item_labels: ArrayLike,
    *,
    remove_self: ArrayLike | None = None,
    ks: Sequence[int] = KS,
    block: int | None = None,
) -> Retrieval:
    """Rank the items of several versions as one list, and measure CMC@k and average precision.

    Ties (in float32) are ranked pessimistically: irrelevant items first.

    Args:
        shards: queries and items of each version; items are numbered consecutively, shard after shard.
        query_labels: (Q,) class of each query; any comparable type.
        item_labels: (N,) class of each item.
        remove_self: (Q,) the item that is the same image as the query, -1 if none; left out of that query's ranking.
        ks: the k of CMC@k.
        block: queries ranked at once; by default as many as BLOCK_SCORES allows.

    Raises:
        InvalidArgument: shapes that do not fit, numbers that are not finite, or a k below 1.
    """
    query_codes, item_codes = _codes(query_labels, item_labels)
    self_Q = np.full(len(query_codes), -1) if remove_self is None else np.asarray(remove_self)
    pairs = [comparable(shard) for shard in shards]
    _check(pairs, query_codes, item_codes, self_Q, ks)
    parts = []
    for rows in blocks(len(query_codes), len(item_codes), block):
        relevant_BN = query_codes[rows, None] == item_codes
        cost_BN = np.concatenate([costs(q[rows], x, s.space) for (q, x), s in zip(pairs, shards, strict=True)], axis=1)
        leave_out(self_Q[rows], cost_BN, relevant_BN)
        parts.append(ranked(cost_BN, relevant_BN, ks))
    return joined(parts, ks)


def ranked(cost_BN: NDArray[np.float32], relevant_BN: Bools, ks: Sequence[int] = KS) -> Retrieval:
    """Rank the items of each query by ascending cost, and measure. Call `leave_out` before."""
    keys_BN = _sort_keys(cost_BN, relevant_BN)
    keys_BN.sort(axis=1)
    return _measure((keys_BN & 1).astype(bool), relevant_BN.sum(axis=1), ks)


def ordered(cost_BN: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Integers (B, N) in the order of the costs.

    IEEE floats sort as integers if negative ones are inverted and the sign bit of the others is set.
    """
    bits = (cost_BN + np.float32(0)).view(np.uint32)  # + 0 turns -0 into 0
    bits ^= (bits.view(np.int32) >> 31).view(np.uint32) | np.uint32(1 << 31)
    return bits


def leave_out(self_B: Ints, cost_BN: NDArray[np.floating], relevant_BN: Bools) -> None:
    """Make each query's own image (-1: none) the last of its ranking, and irrelevant; in place."""
    rows = np.flatnonzero(self_B >= 0)
    cost_BN[rows, self_B[rows]] = np.inf
    relevant_BN[rows, self_B[rows]] = False


def retrieval_from_rankings(ranked_labels_QK: ArrayLike, query_labels: ArrayLike, positives: ArrayLike) -> Retrieval:
    """Measure rankings that a service answered by CMC@1, CMC@5 and average precision.

    Args:
        ranked_labels_QK: class of each match, best first; padded with a label that no query has.
        query_labels: (Q,) class of each query.
        positives: (Q,) number of all items of the query's class. Those not ranked count as missed, so the average
            precision is exact if K is the number of items.
    """
    relevant_QK = np.asarray(ranked_labels_QK) == np.asarray(query_labels)[:, None]
    positives_Q = np.asarray(positives)
    if (relevant_QK.sum(axis=1) > positives_Q).any():
        raise InvalidArgument("a ranking has more correct items than exist", pointer="/positives")
    return joined([_measure(relevant_QK, positives_Q)])


def mean_interval(values: ArrayLike, seed: int = 0, *, n: int = 1000, level: float = 0.95) -> Score:
    """Mean of (Q,) values with its percentile bootstrap interval, `n` resamples of the queries (Efron 1979).

    Raises:
        InvalidArgument: no values.
    """
    values_Q = np.asarray(values, np.float64)
    if values_Q.ndim != 1 or not values_Q.size:
        raise InvalidArgument(f"an interval needs one value per query, not shape {values_Q.shape}")
    generator = np.random.default_rng(seed)
    size = len(values_Q)
    together = max(1, BLOCK_SCORES // size)
    means = np.concatenate(
        [
            values_Q[generator.integers(size, size=(min(together, n - start), size))].mean(axis=1)
            for start in range(0, n, together)
        ]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Score(float(values_Q.mean()), float(low), float(high))


def paired_bootstrap(a_Q: ArrayLike, b_Q: ArrayLike, seed: int = 0, *, n: int = 1000, level: float = 0.95) -> Score:
    """mean(a) - mean(b) over the same queries; both sides of a resample draw the same ones."""
    a, b = np.asarray(a_Q, np.float64), np.asarray(b_Q, np.float64)
    if a.shape != b.shape:
        raise InvalidArgument(f"paired values need one shape, not {a.shape} and {b.shape}")
    return mean_interval(a - b, seed, n=n, level=level)


def t_interval(values: ArrayLike, level: float) -> Score:
    """Mean of (Q,) values, two or more, with its interval by Student's t.

    Valid also for five values and for levels close to 1, for which a percentile bootstrap misses far more often.
    """
    values_Q = np.asarray(values, np.float64)
    mean, size = float(values_Q.mean()), len(values_Q)
    reach = _t_quantile((1 + level) / 2, size - 1) * float(values_Q.std(ddof=1)) / math.sqrt(size)
    return Score(mean, mean - reach, mean + reach)


def _t_quantile(p: float, degrees: float) -> float:
    """Quantile of Student's t with at least four degrees of freedom (Abramowitz and Stegun 1964, 26.7.5)."""
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return z + sum(term / degrees**n for n, term in enumerate(terms, 1))


def p_com(old_old: float, new_old: float, independent: float) -> float:
    """(M(new/old) - M(old/old)) / (M(ind/ind) - M(old/old)) (HBCT, 2506.05826).

    NaN unless the denominator is above 0: below it, a loss would look like a gain and the worst method like the best.
    """
    possible = independent - old_old
    return (new_old - old_old) / possible if possible > 0 else float("nan")


def update_gain(old_old: float, new_old: float, independent: float) -> float | None:
    """`p_com` if M(new/old) > M(old/old), else None (BCT, 2003.11942, section 3.3).

    Also None if M(ind/ind) is not above M(old/old).
    """
    return p_com(old_old, new_old, independent) if min(new_old, independent) > old_old else None


def p_up(new_new: float, independent: float) -> float:
    """(M(new/new) - M(ind/ind)) / M(ind/ind): the loss of the new model by compatibility (HBCT, with the self term)."""
    return (new_new - independent) / independent if independent else float("nan")


def negative_flips(old_Q: ArrayLike, new_Q: ArrayLike) -> int:
    """Number of queries that are hits under old/old and misses under new/old."""
    return int((np.asarray(old_Q, bool) & ~np.asarray(new_Q, bool)).sum())


def linear_cka(x_ND: ArrayLike, y_NE: ArrayLike) -> float:
    """Linear centred kernel alignment of two embeddings of the same N inputs, in [0, 1] (Kornblith 2019, eq. 3)."""
    x, y = (z - z.mean(axis=0) for z in (np.asarray(x_ND, np.float64), np.asarray(y_NE, np.float64)))
    spread = float(np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    return float(np.linalg.norm(y.T @ x) ** 2) / spread if spread else float("nan")


@dataclass(frozen=True)
class CompatibilityMatrix:
    """`values[i, j]` is M(i/j) for queries by i and items by j <= i, versions oldest first; else, or unknown: NaN."""

    names: tuple[str, ...]
    values: Floats

    @property
    def average_compatibility(self) -> float:
        """Share of pairs i > j with M(i/j) > M(j/j); a pair that cannot be compared does not count as compatible."""
        newer, older = np.tril_indices(len(self.names), -1)
        return _mean((self.values[newer, older] > self.values[older, older]).astype(np.float64))


def compatibility_matrix(names: Sequence[str], measure: Callable[[str, str], float | None]) -> CompatibilityMatrix:
    """Fill the matrix of a chain of versions, oldest first; `measure(new, old)` returns M(new/old) or None."""
    values = np.full((len(names), len(names)), np.nan)
    for i, new in enumerate(names):
        for j, old in enumerate(names[: i + 1]):
            measured = measure(new, old)
            values[i, j] = np.nan if measured is None else measured
    return CompatibilityMatrix(tuple(names), values)


def comparable(shard: Compared) -> tuple[Floats, Floats]:
    """Queries (Q, W) and items (N, W) in the layout of their space, in float64.

    Raises:
        InvalidArgument: widths that differ, or numbers that are not finite.
    """
    queries = shard.space.queries(shard.queries).astype(np.float64)
    items = shard.space.items(shard.items).astype(np.float64)
    if queries.shape[1] != items.shape[1]:
        raise InvalidArgument(f"queries and items differ in width: {queries.shape[1]} and {items.shape[1]}")
    if not (np.isfinite(queries).all() and np.isfinite(items).all()):
        raise InvalidArgument("queries and items must be finite numbers")
    return queries, items


def blocks(queries: int, items: int, block: int | None = None) -> list[slice]:
    """Split queries into blocks of `block` queries, by default of about BLOCK_SCORES scores."""
    size = block or max(1, BLOCK_SCORES // max(items, 1))
    return [slice(start, start + size) for start in range(0, queries, size)]


def costs(queries_BW: Floats, items_NW: Floats, space: Space) -> NDArray[np.float32]:
    """Costs (B, N), lower is better, rounded to float32 so that equal vectors tie whatever the order of summation.

    Negative inner products, squared Euclidean distances, or Lorentz distances as a shard scores them (`scores_of`).
    """
    if isinstance(space, Lorentz):
        return space.pairwise(queries_BW, items_NW).astype(np.float32)
    inner_BN = queries_BW @ items_NW.T
    if space.inner_product:
        return -inner_BN.astype(np.float32)
    inner_BN *= -2
    inner_BN += np.einsum("bw,bw->b", queries_BW, queries_BW)[:, None]
    inner_BN += np.einsum("nw,nw->n", items_NW, items_NW)
    return inner_BN.astype(np.float32)


def scores_of(cost: NDArray[np.float32], space: Space) -> NDArray[np.float32]:
    """Costs of any shape -> the scores that users see."""
    if isinstance(space, Lorentz):
        return cost
    return space.score(-cost if space.inner_product else cost)


def _codes(query_labels: ArrayLike, item_labels: ArrayLike) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Labels of any type as small integers, which compare fast."""
    queries, items = np.asarray(query_labels), np.asarray(item_labels)
    _, codes = np.unique(np.concatenate([queries, items]), return_inverse=True)
    return codes[: len(queries)].astype(np.int32), codes[len(queries) :].astype(np.int32)


def _check(
    pairs: Sequence[tuple[Floats, Floats]],
    query_codes: NDArray[np.int32],
    item_codes: NDArray[np.int32],
    self_Q: Ints,
    ks: Sequence[int],
) -> None:
    items = sum(len(x) for _, x in pairs)
    if any(len(q) != len(query_codes) for q, _ in pairs) or len(item_codes) != items:
        raise InvalidArgument("labels need one entry per query and per item")
    if self_Q.shape != query_codes.shape or (self_Q < -1).any() or (self_Q >= max(items, 1)).any():
        raise InvalidArgument(f"remove_self needs one entry per query, an item's number below {items} or -1")
    if min(ks, default=1) < 1:
        raise InvalidArgument("every k must be at least 1")


def _sort_keys(cost_BN: NDArray[np.float32], relevant_BN: Bools) -> NDArray[np.uint64]:
    """Integers of cost (upper bits) and relevance (lowest bit): sorted, irrelevant items come first among ties."""
    keys = ordered(cost_BN).astype(np.uint64)
    keys <<= np.uint64(1)
    keys |= relevant_BN
    return keys


def _measure(relevant_BK: Bools, positives_B: Ints, ks: Sequence[int] = KS) -> Retrieval:
    """Hits and average precision from the relevance of ranked items, best first."""
    row, rank = np.nonzero(relevant_BK)
    found_B = np.bincount(row, minlength=len(relevant_BK))
    before_B = np.cumsum(found_B) - found_B
    precision = (np.arange(1, len(row) + 1) - before_B[row]) / (rank + 1)
    sum_B = np.bincount(row, precision, minlength=len(relevant_BK))
    hits = {k: np.logical_or.reduce(relevant_BK[:, :k], axis=1) for k in ks}
    return Retrieval(hits, sum_B / np.maximum(positives_B, 1), positives_B > 0)


def joined(parts: Sequence[Retrieval], ks: Sequence[int] = KS) -> Retrieval:
    """Concatenate the results of blocks of queries."""
    if not parts:
        return Retrieval({k: np.empty(0, bool) for k in ks}, np.empty(0), np.empty(0, bool))
    hits = {k: np.concatenate([p.hits[k] for p in parts]) for k in ks}
    return Retrieval(hits, np.concatenate([p.ap for p in parts]), np.concatenate([p.valid for p in parts]))


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else float("nan")
