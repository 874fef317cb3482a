"""Merge the results of several parts (shards, or segments of one shard) and decide which parts to search again.

Each part is first searched only for its expected share of the list. A part that contributed more is searched again for
the whole list (`parts_to_repeat`), so that recall also holds if all matches of a query are in one part.
Shape suffixes: Q queries, K results wanted, S results of all parts concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.engines.base import MISSING, Hits, Keys, is_full
from index.space import Vectors

Floats = NDArray[np.float64]


class Merged(NamedTuple):
    """One ranked list per query, (Q, K) each, best first; shorter lists are padded.

    Attributes:
        scores_QK: the scores of the ranking.
        raw_QK: the scores in the spaces of the parts.
        keys_QK: the slots of the items, then MISSING.
        parts_QK: the number of the part that each result is from, then -1.
        full: whether no row is padded.
    """

    scores_QK: Floats | Vectors
    raw_QK: Vectors
    keys_QK: Keys
    parts_QK: NDArray[np.int64]
    full: bool


def merge(found: Sequence[Hits], goodness: Sequence[Floats | Vectors], k: int) -> Merged:
    """The k best of all parts by `goodness` (per part (Q, K), larger first); ties keep the order of the parts."""
    if len(found) == 1:
        return merge_single(found[0], np.where(found[0].slots_QK == MISSING, 0.0, goodness[0]))
    # For one query and few results the overhead of NumPy calls dominates: these are the fewest and cheapest.
    keys_QS = np.concatenate([hits.slots_QK for hits in found], axis=1)
    good_QS: NDArray[Any] = np.concatenate(goodness, axis=1)
    all_full = False not in [hits.full for hits in found]
    if not all_full:
        good_QS[keys_QS == MISSING] = -np.inf
    at_QK = (-good_QS).argsort(axis=1, kind="stable")[:, :k]
    parts_QK = _parts_of(tuple([hits.slots_QK.shape[1] for hits in found])).take(at_QK)
    if len(at_QK) > 1:
        at_QK = at_QK + keys_QS.shape[1] * np.arange(len(at_QK))[:, None]
    raw_QK = np.concatenate([hits.scores_QK for hits in found], axis=1).take(at_QK)
    scores_QK, keys_QK = good_QS.take(at_QK), keys_QS.take(at_QK)
    if not (full := all_full or is_full(keys_QK)):
        none_QK = keys_QK == MISSING
        scores_QK[none_QK], parts_QK[none_QK] = 0.0, -1
    return Merged(scores_QK, raw_QK, keys_QK, parts_QK, full)


def merge_single(hits: Hits, scores_QK: Floats | Vectors) -> Merged:
    """The results of a single part, which are sorted already."""
    parts_QK = np.zeros(hits.slots_QK.shape, np.int64)
    if not hits.full:
        parts_QK[hits.slots_QK == MISSING] = -1
    return Merged(scores_QK, hits.scores_QK, hits.slots_QK, parts_QK, hits.full)


def merge_by_score(found: Sequence[Hits], k: int, *, higher_is_better: bool) -> Merged:
    """The k best of all parts by their scores, which must be of one space."""
    return merge(found, [hits.scores_QK if higher_is_better else -hits.scores_QK for hits in found], k)


def parts_to_repeat(merged: Merged, found: Sequence[Hits], k: int) -> list[list[int]]:
    """For each part, the queries whose k best have more results of it than are reliable, or are fewer than k."""
    rows_QK = merged.parts_QK[:, :k].tolist()  # short lists: counting is faster than NumPy calls
    return [
        [query for query, row in enumerate(rows_QK) if (row.count(part) > most or row[-1] < 0)] if most < k else []
        for part, most in enumerate([hits.reliable for hits in found])
    ]


def replace_rows(hits: Hits, rows: list[int], whole: Hits) -> Hits:
    """The results of a part, with those of the queries `rows` replaced by a search for the whole list."""
    more = whole.scores_QK.shape[1] - hits.scores_QK.shape[1]
    scores_QK = np.pad(hits.scores_QK, ((0, 0), (0, more)))
    slots_QK = np.pad(hits.slots_QK, ((0, 0), (0, more)), constant_values=MISSING)
    scores_QK[rows], slots_QK[rows] = whole.scores_QK, whole.slots_QK
    scanned = replace(hits.scanned, effort=max(hits.scanned.effort, whole.scanned.effort))
    return Hits(scores_QK, slots_QK, is_full(slots_QK), scanned, hits.reliable)


@lru_cache
def _parts_of(widths: tuple[int, ...]) -> NDArray[np.int64]:
    """The number of the part of each concatenated result (S,)."""
    return np.repeat(np.arange(len(widths)), widths)
