"""`TunedIndex`: an index and the efforts that reach its recall aim, measured when it is built (`tune`).

Efforts are measured for lists of ten and longer ones, and for an index with all, a half, a quarter or an eighth of the
rows of a merged list: a smaller part needs to find fewer results, with less effort.

If only some rows are allowed, the index is asked for a longer list, and rows that are not allowed are dropped from it.
(If the index skipped them itself, it would find few allowed rows that are far from the query.) If too few are left, the
allowed rows are compared exhaustively.
Shape suffixes: Q queries, D dimension, R rows, W their width, K wanted, C candidates, P shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.engines.base import MISSING
from index.engines.exact import nearest_rows, score_rows
from index.engines.memory.approximate import Approximate
from index.scan import Mask, Rows
from index.space import Lorentz, Space, Vectors

RECALL_K = 10
"""The k of the recall aim, recall@k."""
LONG_LISTS = (30, 100, 1000)
"""Longer lists that are measured; other lengths are interpolated, and compared exhaustively beyond the last."""
SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of a merged list that an index is measured for; the first is the whole list."""
AIMS = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
"""Measured recall aims for queries with their own aim, which is rounded up to one of these."""
MAX_AIM_FACTOR = 8
"""Other aims are measured up to this factor of the effort for the gallery's aim."""
REFINE_FACTOR = 2
"""Candidates scored exactly, as a factor of the results wanted, if the index is lossy or the space is Lorentz."""
STANDARD_ERRORS = 2.0
"""Standard errors by which the recall of the sample must exceed the aim."""
LONG_SAMPLE = 256
"""Queries of the sample for LONG_LISTS; fewer suffice, because each has more results."""
FILTER_DEVIATIONS = 3.0
"""Standard deviations below the mean number of allowed rows for which a longer list still has enough of them."""
FIRST_QUERIES = 256
"""Queries of the sample that are tried first; doubled until the result is significant."""
SHARE_DEVIATIONS = 1.25
"""Standard deviations above the mean number of its results in a list up to which a part is not searched again."""
TIE_TOLERANCE = 1e-6
"""Relative difference of scores up to which rows are tied, so that either counts as found."""

Recalls = NDArray[np.float64]
"""The recall of each query (Q,)."""


@dataclass(frozen=True)
class TunedIndex:
    """An index and its measured efforts.

    Attributes:
        index: the index over the rows of one segment.
        efforts: smallest effort that reaches the recall aim, for each of SHARES.
        recall: recall@10 over the whole index with the first of `efforts`.
        aims: smallest effort that reaches each of AIMS over the whole index, up to the last aim that is reached.
        long: smallest effort that reaches the recall aim for each of LONG_LISTS over the whole index, up to the length
            from which comparing every row costs less.
    """

    index: Approximate
    efforts: Sequence[int]
    recall: float
    aims: Sequence[int] = ()
    long: Sequence[int] = ()

    def effort_for(self, share: float, k: int, recall: float | None = None) -> float:
        """The effort that reaches a recall aim for this share of a list of the k best; infinite: compare every row.

        `recall`: the aim, by default the one that the index was built for.
        """
        column = max(place for place, measured in enumerate(SHARES) if measured >= share)
        times, needed = self._aim_factor(recall), self.efforts[column]
        if k <= RECALL_K:
            return times * needed
        # The savings of lower aims were measured for ten results only.
        return max(max(times, 1.0) * needed * self._length_factor(k), self.index.min_effort(search_depth(k, share)))

    def cost_for(self, space: Space, effort: float, k: int) -> float:
        """The cost of finding k results, as a number of gathered rows compared, with exact scoring of candidates."""
        return self.index.cost(effort) + (REFINE_FACTOR * k if is_refined(self.index, space) else 0)

    def cost(self, share: float = 1.0) -> float:
        """The cost of a search over all rows for this share of a list, as a number of gathered rows compared."""
        return self.index.cost(self.effort_for(share, RECALL_K))

    def _aim_factor(self, recall: float | None) -> float:
        """The effort of an aim, as a factor of the effort of the index's own aim."""
        if recall is None:
            return 1.0
        reached = [effort for aim, effort in zip(AIMS, self.aims, strict=False) if aim >= recall]
        return reached[0] / self.efforts[0] if reached else math.inf

    def _length_factor(self, k: int) -> float:
        """The effort of a longer list, as a factor of that of ten: power laws between the measured lengths."""
        lengths, efforts = (RECALL_K, *LONG_LISTS), (self.efforts[0], *self.long)
        place = next((n for n, length in enumerate(lengths) if k <= length), len(LONG_LISTS))
        if place >= len(efforts):
            return math.inf
        (less, more), (at_less, at_more) = lengths[place - 1 : place + 1], efforts[place - 1 : place + 1]
        power = math.log(at_more / at_less) / math.log(more / less)
        return at_less / efforts[0] * math.pow(k / less, power)


class TuningResult(NamedTuple):
    """The measured fields of a `TunedIndex`; `efforts` is None if none reaches the recall aim."""

    efforts: Sequence[int] | None
    recall: float
    aims: Sequence[int] = ()
    long: Sequence[int] = ()


def tune(index: Approximate, space: Space, rows_RW: Vectors, queries_QD: Vectors, aim: float) -> TuningResult:
    """Measure the efforts that reach the recall aim, other aims, and the aim for longer lists, with these queries."""
    sample = _Sample(index, space, rows_RW, queries_QD, RECALL_K)
    efforts, reached = sample.efforts_reaching(aim)
    if efforts is None:
        return TuningResult(None, reached)
    aims = sample.efforts_for_aims(AIMS, MAX_AIM_FACTOR * efforts[0])
    long: list[int] = []
    for k in LONG_LISTS:
        if k >= len(rows_RW):
            break
        sample = _Sample(index, space, rows_RW, queries_QD[:LONG_SAMPLE], k)
        if not (found := sample.efforts_for_aims([aim], math.inf, least=[*efforts[:1], *long][-1])):
            break
        long += found
    return TuningResult(efforts, reached, aims, long)


def max_expected(k: int, share: float) -> int:
    """Largest expected number of the k best in a part with this share: the mean plus a margin."""
    return min(k, math.ceil(k * share + SHARE_DEVIATIONS * math.sqrt(k * share * (1 - share))))


def search_depth(k: int, share: float) -> int:
    """Number of results to ask a part for: one more than `max_expected`, which shows whether there are more."""
    return min(k, max_expected(k, share) + 1)


def oversampled(k: int, share: float) -> int:
    """Number of results over all rows that contain the k best allowed ones, if a random `share` of rows is allowed."""
    return k if share == 1 else math.ceil((k + FILTER_DEVIATIONS * math.sqrt(k * (1 - share))) / share)


def search_index(
    index: Approximate, space: Space, rows_RW: Vectors, queries_QD: Vectors, k: int, effort: int
) -> tuple[Vectors, Rows]:
    """Scores of the space (Q, K) and row numbers (Q, K), best first, then MISSING."""
    queries_QW = np.ascontiguousarray(space.queries(queries_QD))
    if is_refined(index, space):
        candidates_QC = index.search(queries_QW, REFINE_FACTOR * max(k, RECALL_K), effort)[1]
        return score_rows(space, queries_QD, rows_RW, candidates_QC, k)
    scanned_QK, at_QK = index.search(queries_QW, k, effort)
    return space.score(scanned_QK), at_QK


def is_refined(index: Approximate, space: Space) -> bool:
    """Whether the candidates of an index must be scored exactly afterwards."""
    return index.lossy or isinstance(space, Lorentz)


def filter_allowed(allowed_R: Mask, found: tuple[Vectors, Rows], k: int) -> tuple[Vectors, Rows]:
    """The first k allowed results (Q, C) -> (Q, K), in their order, then MISSING."""
    scores_QC, at_QC = found
    may_QC = (at_QC != MISSING) & allowed_R[at_QC]
    first_QK = np.argsort(~may_QC, axis=1, kind="stable")[:, :k]
    at_QK = np.take_along_axis(np.where(may_QC, at_QC, MISSING), first_QK, axis=1)
    return np.take_along_axis(scores_QC, first_QK, axis=1), at_QK


class _SampleResults:
    """The results of a search for the queries of a sample, computed as far as they are needed."""

    def __init__(self, search: Callable[[Vectors], tuple[Vectors, Rows]], queries_QD: Vectors) -> None:
        self._search, self._queries_QD = search, queries_QD
        self._parts: list[tuple[Vectors, Rows]] = []
        self._known = 0

    def first(self, queries: int, depth: int) -> tuple[Vectors, Rows]:
        """The first `depth` results of the first `queries` queries: scores and row numbers (Q, K)."""
        if queries > self._known:
            self._parts.append(self._search(self._queries_QD[self._known : queries]))
            self._known = queries
        scores_QK, at_QK = (np.concatenate(found)[:queries, :depth] for found in zip(*self._parts, strict=True))
        return scores_QK, at_QK


class _Sample:
    """Sample queries with their exact k best among the rows of an index."""

    def __init__(self, index: Approximate, space: Space, rows_RW: Vectors, queries_QD: Vectors, k: int) -> None:
        self._index, self._space, self._rows_RW, self._queries_QD = index, space, rows_RW, queries_QD
        self._k = min(k, len(rows_RW))
        # By effort and depth: results for one aim are reused for the next.
        self._found: dict[tuple[int, int], _SampleResults] = {}
        self._exact = nearest_rows(space, queries_QD, rows_RW, None, max(1, self._k))

    def efforts_reaching(self, aim: float) -> tuple[Sequence[int] | None, float]:
        """The smallest effort that reaches the aim for each of SHARES, and the recall over the whole index.

        None and the best recall if none does. A larger share never needs less effort, so smaller ones are measured
        first.
        """
        best, found = 0.0, list[int]()
        depths_P = [search_depth(self._k, share) for share in SHARES]
        for effort in self._efforts(self._index.min_effort(min(depths_P))):
            wanted = max(depth for depth in depths_P if effort >= self._index.min_effort(depth))
            results = self._results(effort, wanted)
            while (depth := depths_P[-1 - len(found)]) <= wanted:
                reached, recall = self._reaches(aim, results, depth, SHARES[-1 - len(found)])
                if not reached:
                    best = max(best, recall)
                    break
                found.append(effort)
                if len(found) == len(SHARES):
                    return found[::-1], recall
        return None, best

    def efforts_for_aims(self, aims: Sequence[float], most: float, least: int = 0) -> list[int]:
        """The smallest effort that reaches each of these ascending aims over the whole index, up to the last reached.

        Efforts above `most`, and those that cost more than comparing every row, are excluded.
        """
        found: list[int] = []
        for effort in self._efforts(max(least, self._index.min_effort(self._k))):
            if effort > most or self._index.cost(effort) >= len(self._rows_RW):
                break
            results = self._results(effort, self._k)
            while self._reaches(aims[len(found)], results, self._k, 1.0)[0]:
                found.append(effort)
                if len(found) == len(aims):
                    return found
        return found

    def _efforts(self, least: float) -> Iterator[int]:
        return (effort for effort in self._index.efforts if self._k and effort >= least)

    def _results(self, effort: int, wanted: int) -> _SampleResults:
        if (found := self._found.get((effort, wanted))) is None:
            searched = partial(search_index, self._index, self._space, self._rows_RW)
            search = partial(searched, k=wanted, effort=effort)
            found = self._found[effort, wanted] = _SampleResults(search, self._queries_QD)
        return found

    def _reaches(self, aim: float, results: _SampleResults, depth: int, share: float) -> tuple[bool, float]:
        exact_QK, exact_at_QK = self._exact

        def recalls(queries: int) -> Recalls:
            exact = exact_QK[:queries, :depth], exact_at_QK[:queries, :depth]
            answered = results.first(queries, depth)
            return found_mask(exact, answered, higher_is_better=self._space.higher_is_better) @ _weights(self._k, share)

        return _reaches(aim, recalls, len(self._queries_QD))


def _reaches(aim: float, recalls: Callable[[int], Recalls], most: int) -> tuple[bool, float]:
    """Whether the recall exceeds the aim, and the recall, by as few of `most` queries as are significant."""
    queries = min(FIRST_QUERIES, most)
    while True:
        recall_Q = recalls(queries)
        mean, error = float(recall_Q.mean()), STANDARD_ERRORS * float(recall_Q.std()) / math.sqrt(queries)
        if mean - error >= aim:
            return True, mean
        if mean + error < aim or queries == most:
            return False, mean
        queries = min(2 * queries, most)


def found_mask(exact: tuple[Vectors, Rows], found: tuple[Vectors, Rows], *, higher_is_better: bool) -> Mask:
    """Whether each of the exact best rows of each query (Q, K), or one tied with it, was found."""
    (exact_QK, exact_at_QK), (found_QK, at_QK) = exact, found
    # Make row numbers unique over queries: comparing all pairs of a thousand results would take gigabytes.
    first_Q = (1 + max(exact_at_QK.max(initial=0), at_QK.max(initial=0))) * np.arange(len(at_QK))[:, None]
    same_QK = np.isin(exact_at_QK + first_Q, np.where(at_QK == MISSING, MISSING, at_QK + first_Q), kind="sort")
    # Similarities are rounded as numbers of about 1 are, distances as what they are.
    slack_QK = TIE_TOLERANCE * np.maximum(1 if higher_is_better else 0, np.abs(exact_QK))
    as_near_QK = found_QK >= exact_QK - slack_QK if higher_is_better else found_QK <= exact_QK + slack_QK
    hit_QK: Mask = same_QK | (as_near_QK & (at_QK != MISSING))
    return hit_QK


@lru_cache
def _weights(k: int, share: float) -> NDArray[np.float64]:
    """The weight (C,) of each rank of a part in a merged list of k; the sum is 1.

    Rank r is in the list if at least r of the k are of this part, a binomial tail for randomly distributed items. A
    part with more than `max_expected` is searched again, so these cases have no weight.
    """
    if share == 1:
        return np.full(k, 1 / k)
    most = max_expected(k, share)
    exactly = [math.comb(k, n) * share**n * (1 - share) ** (k - n) for n in range(most + 1)]
    tail_C = np.array([sum(exactly[rank:]) for rank in range(1, search_depth(k, share) + 1)])
    weights_C: NDArray[np.float64] = tail_C / tail_C.sum()
    return weights_C
