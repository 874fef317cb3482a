"""`Tuned`: an index, and the efforts that reach its recall aim, measured when it is built.

It is measured for lists of ten, and of longer ones; and for an index that is all, or a half, a quarter, an
eighth of what a list is made of: of a part the list needs the first few, which take less than its ten best, and no more
are asked for.

Where only some rows may be found, the index is asked for a list that is as much longer, and what may not be found is
left out of it. An index that skips such rows itself finds few of the others where these lie away from the query; of a
list, too few are left then, which tells that they have to be compared one by one.
Shape suffixes: Q queries, D dimension, R rows, W their width, K wanted, C candidates, P parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.engines.approximate import Approximate
from index.engines.base import MISSING
from index.engines.exact import nearest_rows, score_rows
from index.scan import Mask, Rows
from index.space import Lorentz, Space, Vectors

AIM_K = 10
"""The recall aim is of so many best."""
LONG_LISTS = (30, 100, 1000)
"""So many best are to reach it, too; what takes a list in between, or a longer one, is reckoned from them."""
PARTS = (1.0, 0.5, 0.25, 0.125)
"""The parts of a list that an index is measured as; the first is the whole."""
AIMS = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
"""Recall aims that a query may have instead of the gallery's; in between the next higher one counts."""
DEAREST_AIM = 8
"""Other aims are tried up to so many times the effort of the gallery's own."""
REFINED = 2
"""So many times the candidates wanted are scored exactly, where the index keeps codes or the space rounds."""
SURE = 2.0
"""Standard errors of the sample by which its recall is to be above the aim."""
LONG_SAMPLE = 256
"""Queries of the sample for LONG_LISTS, of which each tells more than of ten."""
SPARE = 3.0
"""Standard deviations by which fewer of a longer list may be found than on average, and still are enough."""
FIRST_LOOK = 256
"""Queries of the sample that an effort is tried with, and then as many again, until it is plain what it reaches."""
MARGIN = 1.25
"""Standard deviations by which a part may give more of a list than on average before it is searched more thoroughly."""
SAME = 1e-6
"""Scores that differ by so small a share are of rows that are equally near: which of them is found is chance."""

Recalls = NDArray[np.float64]
"""Of each query (Q,)."""


@dataclass(frozen=True)
class Tuned:
    """An index, and what was measured of it.

    Attributes:
        index: over the rows of one segment.
        efforts: for each of PARTS the least that reaches the recall aim.
        recall: of the ten best of the whole index, with the first of them.
        aims: what reaches each of AIMS as the whole, up to those that are never reached.
        long: what reaches the recall aim for each of LONG_LISTS as the whole, up to those that are found for less by
            comparing every row.
    """

    index: Approximate
    efforts: Sequence[int]
    recall: float
    aims: Sequence[int] = ()
    long: Sequence[int] = ()

    def effort_for(self, part: float, k: int, recall: float | None = None) -> float:
        """What reaches an aim as a part of a list of the k best.

        `recall`: the aim, by default the one it was built for. Infinite: comparing every row does.
        """
        column = max(place for place, measured in enumerate(PARTS) if measured >= part)
        times, needed = self._times(recall), self.efforts[column]
        if k <= AIM_K:
            return times * needed
        # What a lower aim saves was measured for ten.
        return max(max(times, 1.0) * needed * self._longer(k), self.index.least(depth_of(k, part)))

    def cost_for(self, space: Space, effort: float, k: int) -> float:
        """What finding k takes, as so many rows copied together and compared; exact scores of candidates included."""
        return self.index.cost(effort) + (REFINED * k if is_refined(self.index, space) else 0)

    def cost(self, part: float = 1.0) -> float:
        """What a search of all rows takes, as so many rows compared; as a part of a list, if it is one."""
        return self.index.cost(self.effort_for(part, AIM_K))

    def _times(self, recall: float | None) -> float:
        """How many times the effort of its own aim another one takes."""
        if recall is None:
            return 1.0
        reached = [effort for aim, effort in zip(AIMS, self.aims, strict=False) if aim >= recall]
        return reached[0] / self.efforts[0] if reached else math.inf

    def _longer(self, k: int) -> float:
        """How many times the effort of ten a longer list takes: a power of its length, through what was measured."""
        lengths, efforts = (AIM_K, *LONG_LISTS), (self.efforts[0], *self.long)
        place = next((n for n, length in enumerate(lengths) if k <= length), len(LONG_LISTS))
        if place >= len(efforts):
            return math.inf
        (less, more), (at_less, at_more) = lengths[place - 1 : place + 1], efforts[place - 1 : place + 1]
        power = math.log(at_more / at_less) / math.log(more / less)
        return at_less / efforts[0] * math.pow(k / less, power)


class Measured(NamedTuple):
    """What was measured of an index: as `Tuned`; `efforts` None: none reaches the aim."""

    efforts: Sequence[int] | None
    recall: float
    aims: Sequence[int] = ()
    long: Sequence[int] = ()


def tune(index: Approximate, space: Space, rows_RW: Vectors, queries_QD: Vectors, aim: float) -> Measured:
    """What reaches a recall aim for such queries, other aims, and longer lists."""
    sample = _Sample(index, space, rows_RW, queries_QD, AIM_K)
    efforts, reached = sample.reaching(aim)
    if efforts is None:
        return Measured(None, reached)
    aims = sample.reaching_each(AIMS, DEAREST_AIM * efforts[0])
    long: list[int] = []
    for k in LONG_LISTS:
        if k >= len(rows_RW):
            break
        sample = _Sample(index, space, rows_RW, queries_QD[:LONG_SAMPLE], k)
        if not (found := sample.reaching_each([aim], math.inf, least=[*efforts[:1], *long][-1])):
            break
        long += found
    return Measured(efforts, reached, aims, long)


def most_of(k: int, part: float) -> int:
    """Of the k best so many, or fewer, lie in a part: what they are on average, and a margin."""
    return min(k, math.ceil(k * part + MARGIN * math.sqrt(k * part * (1 - part))))


def depth_of(k: int, part: float) -> int:
    """So many of a part are asked for: one more than are expected, which tells that there are more."""
    return min(k, most_of(k, part) + 1)


def widened(k: int, share: float) -> int:
    """So many best have the k best among them of the share of rows that may be found, where these lie by chance."""
    return k if share == 1 else math.ceil((k + SPARE * math.sqrt(k * (1 - share))) / share)


def search_index(
    index: Approximate, space: Space, rows_RW: Vectors, queries_QD: Vectors, k: int, effort: int
) -> tuple[Vectors, Rows]:
    """Scores in the space's own terms (Q, K) and row numbers (Q, K), best first; MISSING where it found no more."""
    queries_QW = np.ascontiguousarray(space.queries(queries_QD))
    if is_refined(index, space):
        candidates_QC = index.search(queries_QW, REFINED * max(k, AIM_K), effort)[1]
        return score_rows(space, queries_QD, rows_RW, candidates_QC, k)
    scanned_QK, at_QK = index.search(queries_QW, k, effort)
    return space.score(scanned_QK), at_QK


def is_refined(index: Approximate, space: Space) -> bool:
    """Whether what it finds is scored exactly."""
    return index.lossy or isinstance(space, Lorentz)


def only(allowed_R: Mask, found: tuple[Vectors, Rows], k: int) -> tuple[Vectors, Rows]:
    """The first k of what was found (Q, C) that may be, in its order; MISSING where there are fewer."""
    scores_QC, at_QC = found
    may_QC = (at_QC != MISSING) & allowed_R[at_QC]
    first_QK = np.argsort(~may_QC, axis=1, kind="stable")[:, :k]
    at_QK = np.take_along_axis(np.where(may_QC, at_QC, MISSING), first_QK, axis=1)
    return np.take_along_axis(scores_QC, first_QK, axis=1), at_QK


class _Answers:
    """What a search finds for the first queries of a sample, (Q, K) each, and for more of them when they are wanted."""

    def __init__(self, search: Callable[[Vectors], tuple[Vectors, Rows]], queries_QD: Vectors) -> None:
        self._search, self._queries_QD = search, queries_QD
        self._parts: list[tuple[Vectors, Rows]] = []
        self._known = 0

    def first(self, queries: int, depth: int) -> tuple[Vectors, Rows]:
        """Scores and row numbers of so many queries, the best of each."""
        if queries > self._known:
            self._parts.append(self._search(self._queries_QD[self._known : queries]))
            self._known = queries
        scores_QK, at_QK = (np.concatenate(found)[:queries, :depth] for found in zip(*self._parts, strict=True))
        return scores_QK, at_QK


class _Sample:
    """Queries, and what the k best of them are among the rows of an index."""

    def __init__(self, index: Approximate, space: Space, rows_RW: Vectors, queries_QD: Vectors, k: int) -> None:
        self._index, self._space, self._rows_RW, self._queries_QD = index, space, rows_RW, queries_QD
        self._k = min(k, len(rows_RW))
        # By effort and how many were wanted: what one aim was measured with serves the next.
        self._found: dict[tuple[int, int], _Answers] = {}
        self._right = nearest_rows(space, queries_QD, rows_RW, None, max(1, self._k))

    def reaching(self, aim: float) -> tuple[Sequence[int] | None, float]:
        """The first effort that reaches the aim as each of PARTS, and its recall as the whole.

        None, and the best recall, where none does. A larger part takes no less than a smaller one, so that they are
        measured in that order.
        """
        best, found = 0.0, list[int]()
        depths_P = [depth_of(self._k, part) for part in PARTS]
        for effort in self._efforts(self._index.least(min(depths_P))):
            wanted = max(depth for depth in depths_P if effort >= self._index.least(depth))
            answers = self._answers(effort, wanted)
            while (depth := depths_P[-1 - len(found)]) <= wanted:
                reached, recall = self._reaches(aim, answers, depth, PARTS[-1 - len(found)])
                if not reached:
                    best = max(best, recall)
                    break
                found.append(effort)
                if len(found) == len(PARTS):
                    return found[::-1], recall
        return None, best

    def reaching_each(self, aims: Sequence[float], most: float, least: int = 0) -> list[int]:
        """The first effort that reaches each of these aims, which ascend, as the whole, up to those that none reaches.

        An effort above `most` counts for none, and what takes longer than to compare every row.
        """
        found: list[int] = []
        for effort in self._efforts(max(least, self._index.least(self._k))):
            if effort > most or self._index.cost(effort) >= len(self._rows_RW):
                break
            answers = self._answers(effort, self._k)
            while self._reaches(aims[len(found)], answers, self._k, 1.0)[0]:
                found.append(effort)
                if len(found) == len(aims):
                    return found
        return found

    def _efforts(self, least: float) -> Iterator[int]:
        return (effort for effort in self._index.efforts if self._k and effort >= least)

    def _answers(self, effort: int, wanted: int) -> _Answers:
        if (found := self._found.get((effort, wanted))) is None:
            searched = partial(search_index, self._index, self._space, self._rows_RW)
            search = partial(searched, k=wanted, effort=effort)
            found = self._found[effort, wanted] = _Answers(search, self._queries_QD)
        return found

    def _reaches(self, aim: float, answers: _Answers, depth: int, part: float) -> tuple[bool, float]:
        right_QK, right_at_QK = self._right

        def recalls(queries: int) -> Recalls:
            right = right_QK[:queries, :depth], right_at_QK[:queries, :depth]
            answered = answers.first(queries, depth)
            return hits(right, answered, higher_is_better=self._space.higher_is_better) @ _weights(self._k, part)

        return _reaches(aim, recalls, len(self._queries_QD))


def _reaches(aim: float, recalls: Callable[[int], Recalls], most: int) -> tuple[bool, float]:
    """Whether a recall is above the aim, by as few of the `most` queries as make it plain; and the recall of those."""
    queries = min(FIRST_LOOK, most)
    while True:
        recall_Q = recalls(queries)
        mean, error = float(recall_Q.mean()), SURE * float(recall_Q.std()) / math.sqrt(queries)
        if mean - error >= aim:
            return True, mean
        if mean + error < aim or queries == most:
            return False, mean
        queries = min(2 * queries, most)


def hits(right: tuple[Vectors, Rows], found: tuple[Vectors, Rows], *, higher_is_better: bool) -> Mask:
    """Which of the best rows of each query were found (Q, K), or another that is as near in their place."""
    (right_QK, right_at_QK), (found_QK, at_QK) = right, found
    # As numbers that tell the queries apart: to compare each of a thousand with each takes gigabytes.
    first_Q = (1 + max(right_at_QK.max(initial=0), at_QK.max(initial=0))) * np.arange(len(at_QK))[:, None]
    same_QK = np.isin(right_at_QK + first_Q, np.where(at_QK == MISSING, MISSING, at_QK + first_Q), kind="sort")
    slack_QK = SAME * np.maximum(1, np.abs(right_QK))
    as_near_QK = found_QK >= right_QK - slack_QK if higher_is_better else found_QK <= right_QK + slack_QK
    hit_QK: Mask = same_QK | (as_near_QK & (at_QK != MISSING))
    return hit_QK


@lru_cache
def _weights(k: int, part: float) -> NDArray[np.float64]:
    """How much each of the best of a part matters for a list of k over all parts (C,), summing up to 1.

    Rank r is in the list if at least r of the k are of this part, which is binomial where items lie anywhere by chance;
    where there are more of it than `most_of`, it is asked again, and what it found before does not matter.
    """
    if part == 1:
        return np.full(k, 1 / k)
    most = most_of(k, part)
    exactly = [math.comb(k, n) * part**n * (1 - part) ** (k - n) for n in range(most + 1)]
    tail_C = np.array([sum(exactly[rank:]) for rank in range(1, depth_of(k, part) + 1)])
    weights_C: NDArray[np.float64] = tail_C / tail_C.sum()
    return weights_C
