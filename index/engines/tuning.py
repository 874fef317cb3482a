"""`Tuned`: an index, and the efforts that reach its recall aim, measured when it is built.

It is measured where all rows may be found, one of two, or one of ten; and for an index that is all, or a half, a
quarter, an eighth of what a list is made of: of a part the list needs the first few, which take less than its ten best,
and no more are asked for.
Shape suffixes: Q queries, D dimension, R rows, W their width, K wanted, C candidates, P parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from index.engines.approximate import Approximate, Selection
from index.engines.base import MISSING
from index.engines.exact import nearest_rows, score_rows
from index.scan import Mask, Rows
from index.space import Lorentz, Space, Vectors

AIM_K = 10
"""The recall aim is of so many best; what more of them take is reckoned from it."""
PARTS = (1.0, 0.5, 0.25, 0.125)
"""The parts of a list that an index is measured as; the first is the whole."""
SHARES = (1.0, 0.5, 0.1)
"""The shares of rows that may be found which efforts are measured at."""
REFINED = 2
"""So many times the candidates wanted are scored exactly, where the index keeps codes or the space rounds."""
SURE = 2.0
"""Standard errors of the sample by which its recall is to be above the aim."""
FILTERED_SAMPLE = 512
"""Queries of the sample for the other SHARES: dear ones, whose efforts lie far apart."""
FIRST_LOOK = 256
"""Queries of the sample that an effort is tried with, and then as many again, until it is plain what it reaches."""
MARGIN = 1.25
"""Standard deviations by which a part may give more of a list than on average before it is searched more thoroughly."""
SAME = 1e-6
"""Scores that differ by so small a share are of rows that are equally near: which of them is found is chance."""

Recalls = NDArray[np.float64]
"""Of each query (Q,)."""
Efforts = Sequence[Sequence[int]]
"""For each of SHARES for each of PARTS the least effort that reaches the recall aim."""


@dataclass(frozen=True)
class Tuned:
    """An index, and what was measured of it.

    Attributes:
        index: over the rows of one segment.
        efforts: what reaches the recall aim.
        recall: of the ten best of the whole index, with the first of them.
    """

    index: Approximate
    efforts: Efforts
    recall: float

    def effort_for(self, share: float, part: float, k: int) -> float:
        """What reaches the aim where a share of the rows may be found, as a part of a list of the k best."""
        column = max(place for place, measured in enumerate(PARTS) if measured >= part)
        needed = _between(share, [efforts[column] for efforts in self.efforts])
        if k <= AIM_K:
            return needed
        # Twice what they are more: one more, as pages ask for to see whether there is another, is no list of its own.
        return max(needed * math.sqrt(k / AIM_K), needed + self.index.least(REFINED * (k - AIM_K) * part / share))


def tune(
    index: Approximate, space: Space, rows_RW: Vectors, queries_QD: Vectors, aim: float
) -> tuple[Efforts | None, float]:
    """The efforts that reach a recall aim for such queries, None where none does; and the recall reached."""
    random = np.random.default_rng(0)
    measured: list[Sequence[int]] = []
    reached = 0.0
    for share in SHARES:
        allowed_R = None if share == 1 else random.random(len(rows_RW)) < share
        least = measured[-1][-1] if measured else 0
        asked_QD = queries_QD if share == 1 else queries_QD[:FILTERED_SAMPLE]
        efforts, recall = _reaching(index, space, rows_RW, asked_QD, aim, allowed_R, least)
        if not measured:
            reached = recall
            if efforts is None:
                return None, reached
        # Where too few rows are left to measure with, more than it could take: they are compared.
        measured.append(efforts or [math.ceil(effort / share**2) for effort in measured[0]])
    return measured, reached


def most_of(k: int, part: float) -> int:
    """Of the k best so many, or fewer, lie in a part: what they are on average, and a margin."""
    return min(k, math.ceil(k * part + MARGIN * math.sqrt(k * part * (1 - part))))


def depth_of(k: int, part: float) -> int:
    """So many of a part are asked for: one more than are expected, which tells that there are more."""
    return min(k, most_of(k, part) + 1)


def search_index(
    index: Approximate, space: Space, rows_RW: Vectors, queries_QD: Vectors, k: int, effort: int, among: Selection
) -> tuple[Vectors, Rows]:
    """Scores in the space's own terms (Q, K) and row numbers (Q, K), best first; MISSING where it found no more."""
    queries_QW = np.ascontiguousarray(space.queries(queries_QD))
    if index.lossy or isinstance(space, Lorentz):
        candidates_QC = index.search(queries_QW, REFINED * max(k, AIM_K), effort, among)[1]
        return score_rows(space, queries_QD, rows_RW, candidates_QC, k)
    scanned_QK, at_QK = index.search(queries_QW, k, effort, among)
    return space.score(scanned_QK), at_QK


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


def _reaching(
    index: Approximate,
    space: Space,
    rows_RW: Vectors,
    queries_QD: Vectors,
    aim: float,
    allowed_R: Mask | None,
    least: int,
) -> tuple[Sequence[int] | None, float]:
    """The first effort that reaches the aim as each of PARTS among some rows, and its recall as the first, or the best.

    A larger part takes no less than a smaller one, so that they are measured in that order.
    """
    k = min(AIM_K, len(rows_RW) if allowed_R is None else int(np.count_nonzero(allowed_R)))
    if not k:
        return None, 0.0
    right_QK, right_at_QK = nearest_rows(space, queries_QD, rows_RW, allowed_R, k)
    among, best = Selection(allowed_R), 0.0
    found: list[int] = []
    depths_P = [depth_of(k, part) for part in PARTS]
    for effort in (effort for effort in index.efforts if effort >= max(least, index.least(min(depths_P)))):
        wanted = max(depth for depth in depths_P if effort >= index.least(depth))
        search = partial(search_index, index, space, rows_RW, k=wanted, effort=effort, among=among)
        answers = _Answers(search, queries_QD)
        while (depth := depths_P[-1 - len(found)]) <= wanted:
            part = PARTS[-1 - len(found)]

            def recalls(queries: int, depth: int = depth, part: float = part, answers: _Answers = answers) -> Recalls:
                right = right_QK[:queries, :depth], right_at_QK[:queries, :depth]
                answered = answers.first(queries, depth)
                return hits(right, answered, higher_is_better=space.higher_is_better) @ _weights(k, part)

            reached, recall = _reaches(aim, recalls, len(queries_QD))
            if not reached:
                best = max(best, recall)
                break
            found.append(effort)
            if part == 1:
                return found[::-1], recall
    return None, best


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
    same_QK = (right_at_QK[:, :, None] == at_QK[:, None, :]).any(axis=2)
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
    most = most_of(k, part)
    exactly = [math.comb(k, n) * part**n * (1 - part) ** (k - n) for n in range(most + 1)]
    tail_C = np.array([sum(exactly[rank:]) for rank in range(1, depth_of(k, part) + 1)])
    weights_C: NDArray[np.float64] = tail_C / tail_C.sum()
    return weights_C


def _between(share: float, measured: Sequence[int]) -> float:
    """A power of the share through the two measured ones beside it, or the last two."""
    place = next((n for n, thinner in enumerate(SHARES[1:]) if share >= thinner), len(SHARES) - 2)
    (more, less), (at_more, at_less) = SHARES[place : place + 2], measured[place : place + 2]
    return at_more * math.pow(at_less / at_more, math.log(share / more) / math.log(less / more))
