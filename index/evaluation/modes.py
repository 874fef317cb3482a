"""Choose the merge mode for a gallery with items of two versions by simulating a backfill (`choose_merge_mode`).

The same queries rank a gallery of which 0, 20, ... 100 % of the items have moved, in every mode, each half of the
queries with the maps fitted on the other half. Modes are compared by paired bootstrap over the queries' areas under
these curves, by the metric asked for and a second one: CMC@1, which most users see, or mAP, which measures the whole
ranking and is less noisy. Gains are measured in half-widths of their intervals. A mode replaces the default if its two
gains over it add up to more than one half-width, unless it is significantly worse by the metric asked for. The
remaining modes then challenge the winner in the same way.

Shape suffixes: Q queries, N items, P points of a curve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from index.evaluation.curves import CALIBRATED, LABEL_FREE, RANK, RAW, curve_values
from index.evaluation.metrics import MEAN_AP, Compared, paired_bootstrap
from index.evaluation.relevance import LabelRelevance, ListedRelevance, RankingRelevance, Relevance
from index.query.merge import Mode
from index.version import Score

Floats = NDArray[np.float64]

QUERIES, ITEMS, POINTS = 500, 2_000, 6
"""The largest sample to compare modes on, and the number of points of its curves."""


@dataclass(frozen=True)
class ChosenMode:
    """The best mode, and its evidence.

    Attributes:
        mode: raw, calibrated or rank.
        metric: the metric asked for.
        areas: mode -> the area under its curve by that metric.
        gains: other mode -> the area of the best mode minus its area, by that metric, paired.
        queries: number of queries compared.
    """

    mode: Mode
    metric: str
    areas: Mapping[str, float]
    gains: Mapping[str, Score]
    queries: int


def choose_merge_mode(
    before: Compared, after: Compared, relevance: Relevance, *, default: Mode, metric: str = "cmc@1", seed: int = 0
) -> ChosenMode | None:
    """Simulate a backfill and choose its best mode.

    Args:
        before: queries and items before any item has moved.
        after: the same after all have moved; items in the same order.
        relevance: by labels, or by a ranking.
        default: the mode that others have to beat.
        metric: "cmc@<k>" or "mAP@1.0".
        seed: seed of the sample and the bootstrap.

    Returns:
        None if fewer than two queries have relevant items.
    """
    before, after, relevance = _sample(before, after, relevance, seed)
    if int(relevance.valid.sum()) < 2:
        return None
    alike = before.space.kind == after.space.kind
    fitted = LABEL_FREE if isinstance(relevance, RankingRelevance) else CALIBRATED
    order = {"": np.random.default_rng(seed).permutation(len(before.items))}
    modes = [*([RAW] if alike else []), fitted, RANK]
    other = "cmc@1" if metric == MEAN_AP else MEAN_AP
    areas = {}
    for name in (metric, other):
        curves = curve_values(before, after, relevance, order, modes, metric=name, points=POINTS, seed=seed)
        areas[name] = {_mode(mode): _area(values_PQ) for (_, mode), values_PQ in curves.items()}
    return decide_mode(areas, default if default in areas[metric] else Mode.CALIBRATED, seed)


def decide_mode(areas: Mapping[str, Mapping[Mode, Floats]], default: Mode, seed: int = 0) -> ChosenMode:
    """Choose the best mode from areas under curves.

    Args:
        areas: metric -> mode -> (Q,) area of each query; the metric asked for comes first.
        default: the mode that others have to beat.
        seed: seed of the bootstrap.
    """
    metric = next(iter(areas))
    best = default
    for mode in [mode for mode in Mode if mode in areas[metric] and mode is not default]:
        gains = [paired_bootstrap(area[mode], area[best], seed) for area in areas.values()]
        if gains[0].high >= 0 and sum(_half_widths(gain) for gain in gains) > 1:
            best = mode
    area = areas[metric]
    cmc_gain = {mode.value: paired_bootstrap(area[best], area[mode], seed) for mode in area if mode is not best}
    return ChosenMode(
        best, metric, {mode.value: float(own.mean()) for mode, own in area.items()}, cmc_gain, len(area[best])
    )


def _half_widths(gain: Score) -> float:
    """A gain in half-widths of its interval; infinite if every query gains the same."""
    width = (gain.high - gain.low) / 2
    if width <= 0:
        return float(np.sign(gain.value)) * np.inf if gain.value else 0.0
    return gain.value / width


def _area(values_PQ: Floats) -> Floats:
    """The mean (Q,) of each query's curve."""
    return np.asarray(np.trapezoid(values_PQ, dx=1 / (len(values_PQ) - 1), axis=0))


def _mode(name: str) -> Mode:
    return Mode.CALIBRATED if name == LABEL_FREE else Mode(name)


def _sample(before: Compared, after: Compared, relevance: Relevance, seed: int) -> tuple[Compared, Compared, Relevance]:
    """At most QUERIES queries over at most ITEMS items, a query's own image among them."""
    generator = np.random.default_rng(seed)
    rows = np.sort(generator.permutation(np.flatnonzero(relevance.valid))[:QUERIES])
    count = len(before.items)
    own = relevance.self_Q[rows]
    needed = [own[own >= 0]]
    if isinstance(relevance, ListedRelevance):
        named = relevance.relevant_QK[rows].ravel()
        needed.append(named[named >= 0])
    kept = np.unique(np.concatenate(needed))
    rest = np.setdiff1d(np.arange(count), kept)
    items = np.sort(np.concatenate([kept, generator.permutation(rest)[: max(0, ITEMS - len(kept))]]))
    place = np.full(count + 1, -1)
    place[items] = np.arange(len(items))
    cut = [replace(side, queries=side.queries[rows], items=side.items[items]) for side in (before, after)]
    if isinstance(relevance, ListedRelevance):
        return cut[0], cut[1], type(relevance)(place[relevance.relevant_QK[rows]], len(items), place[own])
    return cut[0], cut[1], LabelRelevance(relevance.query_codes[rows], relevance.item_codes[items], place[own])
