"""Evaluation of several versions: the compatibility matrix M(new/old) of all pairs, and what each upgrade gains.

Every number is measured as serving would answer: by exported encoders, declared edges, chains of them, and forward
transforms of stored items. Cells that no declared edge reaches stay empty. Metrics are those of docs/methods.md;
intervals are percentile bootstraps over queries, paired where two measurements are compared. Shape suffixes: Q queries,
N items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.errors import InvalidArgument
from index.evaluation.curves import MeasuredCurve, measure_curves
from index.evaluation.metrics import (
    Compared,
    CompatibilityMatrix,
    Retrieval,
    compatibility_matrix,
    linear_cka,
    mean_interval,
    mixed_retrieval,
    negative_flips,
)
from index.evaluation.ordering import POINTS, PendingItems, backfill_order
from index.evaluation.relevance import LabelRelevance
from index.evaluation.scores import METRICS, gain
from index.version import Card, Score, Version
from training.data.images import Data
from training.evaluation.criterion import Strict, strict_criterion
from training.evaluation.cross_version import CrossVersion, CrossVersions, oldest_first
from training.evaluation.edges import with_unexported_edges
from training.evaluation.embeddings import embed_version
from training.evaluation.rates import verification_rates

ORDERS = ("random", "uncertainty")
POSSIBLE_ORDERS = (*ORDERS, "oldest", "newest")
"""Those of backfills that a data set has; the others need what only a service knows: queries, and items that moved."""
REENCODE = "reencode"
TRANSFORM = "transform"
REFINE = "reencode after transform"
DECIDING_METRIC = "cmc@1"
"""The metric that decides on compatibility, as in the gate; flips are counted on it, curves measure it by default."""


@dataclass(frozen=True)
class Cell:
    """M(new/old): the kinds of the route's edges, per-query results, and the verification rates if requested."""

    kinds: tuple[str, ...]
    retrieval: Retrieval
    rates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Upgrade:
    """A new version over an older one's items; metric -> score in each mapping.

    Attributes:
        difference: M(new/old) - M(old/old).
        p_com: difference / (M(ind/ind) - M(old/old)), where an independent version is better than the old one.
        flips: queries whose first match was right under old/old and is wrong under new/old, and their share.
        cka: linear centred kernel alignment of the two versions' item embeddings.
        strict: shares of pairwise constraints that hold; None where both do not meet in the old space.
    """

    difference: Mapping[str, Score]
    p_com: Mapping[str, Score]
    flips: int
    flip_share: Score
    cka: float
    strict: Strict | None = None

    @property
    def update_gain(self) -> dict[str, Score]:
        """`p_com` where compatibility holds, M(new/old) > M(old/old), as `index.evaluation.metrics.update_gain`."""
        return {m: score for m, score in self.p_com.items() if self.difference[m].value > 0}


@dataclass(frozen=True)
class Evaluation:
    """All measurements; pairs are (new, old).

    Attributes:
        cards: by name, oldest first.
        cells: the pairs that edges connect, (name, name) among them.
        upgrades: the same pairs without (name, name).
        p_up: name -> metric -> (M(new/new) - M(ind/ind)) / M(ind/ind).
        curves: (new, old, kind of backfill, order, "raw" or "calibrated") -> curve. Kinds: "reencode"; where forward
            edges lead also "transform" and "reencode after transform", which FastFill orders by uncertainty.
        metric: what the curves measure.
        queries, items, skipped: their numbers; queries without a relevant item are skipped.
        compared: the queries and items compared in each cell.
    """

    cards: Mapping[str, Card]
    cells: Mapping[tuple[str, str], Cell]
    upgrades: Mapping[tuple[str, str], Upgrade]
    p_up: Mapping[str, Mapping[str, Score]]
    curves: Mapping[tuple[str, str, str, str, str], MeasuredCurve]
    metric: str
    queries: int
    items: int
    skipped: int
    compared: Mapping[tuple[str, str], Compared] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The versions, oldest first."""
        return list(self.cards)

    def matrix(self, metric: str) -> CompatibilityMatrix:
        """The means of one metric; None where no edge leads."""

        def measure(new: str, old: str) -> float | None:
            return self.cells[new, old].retrieval.mean(metric) if (new, old) in self.cells else None

        return compatibility_matrix(self.names, measure)


def evaluate(
    versions: Sequence[Version],
    data: Data,
    *,
    independents: Mapping[str, Version] | None = None,
    orders: Sequence[str] = ORDERS,
    metric: str = DECIDING_METRIC,
    points: int = POINTS,
    verification: bool = False,
) -> Evaluation:
    """Measure versions against each other on a data set's query and gallery images.

    Args:
        versions: any order; edges among them say who is older.
        data: its queries and items are used, not its training images.
        independents: name -> the version trained on the same data without regard to the old one.
        orders: of the backfill curves; `uncertainty` is left out where items have no uncertainty.
        metric: what the curves measure, one of `METRICS`.
        points: of each curve.
        verification: also measure TAR@FAR and TPIR@FPIR.

    Raises:
        InvalidArgument: versions of one name, an unknown order or metric, or a data set without a usable query.
        NoEncoder: a version cannot embed images here.
        InvalidVersionFolder: an encoder or an edge is not what its card says.
    """
    named = _by_name(versions)
    relevance = relevance_of(data)
    if metric not in METRICS:
        raise InvalidArgument(f"metric must be one of {', '.join(METRICS)}, not {metric!r}", pointer="/metric")
    for order in orders:
        if order not in POSSIBLE_ORDERS:
            raise InvalidArgument(f"order must be one of {', '.join(POSSIBLE_ORDERS)}, not {order!r}", pointer="/order")
    cross_versions = CrossVersions({name: embed_version(named[name], data) for name in oldest_first(named)})
    declared = {
        pair: cross_version
        for pair in _pairs(cross_versions)
        if (cross_version := cross_versions.declared(*pair)) is not None
    }
    cells = {pair: _cell(cross_version, relevance, verification) for pair, cross_version in declared.items()}
    independent = {
        name: _independent_retrieval(version, data, relevance) for name, version in (independents or {}).items()
    }
    upgrades = {
        pair: _upgrade(*pair, cross_versions, declared, cells, relevance, independent.get(pair[0]))
        for pair in cells
        if pair[0] != pair[1]
    }
    curves = {
        (*pair, *key): curve
        for pair in upgrades
        for key, curve in _curves(*pair, cross_versions, relevance, orders, metric, points)
    }
    return Evaluation(
        cards={name: embeddings.version.card for name, embeddings in cross_versions.embeddings.items()},
        cells=cells,
        upgrades=upgrades,
        p_up={name: _p_up(cells[name, name].retrieval, retrieval) for name, retrieval in independent.items()},
        curves=curves,
        metric=metric,
        queries=len(data.query),
        items=len(data.gallery),
        skipped=int((~relevance.valid).sum()),
        compared={pair: cross_version.compared for pair, cross_version in declared.items()},
    )


def relevance_of(data: Data) -> LabelRelevance:
    """The relevant items of each query of a data set: those of its class, without itself.

    Raises:
        InvalidArgument: fewer than two queries have an item of their class besides themselves.
    """
    _, codes = np.unique(np.concatenate([data.query.labels, data.gallery.labels]), return_inverse=True)
    queries = len(data.query)
    self_Q = np.arange(queries) if data.same else np.full(queries, -1)
    relevance = LabelRelevance(codes[:queries], codes[queries:], self_Q)
    if relevance.valid.sum() < 2:
        raise InvalidArgument(
            "an evaluation requires at least two queries with an item of their class", pointer="/data"
        )
    return relevance


def ratio_interval(numerator_Q: ArrayLike, denominator_Q: ArrayLike) -> Score | None:
    """mean(numerator) / mean(denominator) over the same queries with its 95 % percentile bootstrap interval.

    None unless mean(denominator) is above 0, see `index.evaluation.metrics.p_com`; resamples in which it is 0 are left
    out.
    """
    top, bottom = np.asarray(numerator_Q, np.float64), np.asarray(denominator_Q, np.float64)
    if bottom.mean() <= 0:
        return None
    generator = np.random.default_rng(0)
    samples = (generator.integers(len(top), size=len(top)) for _ in range(1000))
    tops, bottoms = np.array([(top[rows].mean(), bottom[rows].mean()) for rows in samples]).T
    low, high = np.quantile(tops[bottoms != 0] / bottoms[bottoms != 0], [0.025, 0.975])
    return Score(float(top.mean() / bottom.mean()), float(low), float(high))


def _by_name(versions: Iterable[Version]) -> dict[str, Version]:
    named: dict[str, Version] = {}
    for version in versions:
        if version.name in named:
            raise InvalidArgument(f"two of the versions are named {version.name!r}", pointer="/versions")
        named[version.name] = with_unexported_edges(version)
    return named


def _pairs(cross_versions: CrossVersions) -> list[tuple[str, str]]:
    names = list(cross_versions.embeddings)
    return [(new, old) for row, new in enumerate(names) for old in names[: row + 1]]


def _retrieve(compared: Compared, relevance: LabelRelevance) -> Retrieval:
    return mixed_retrieval([compared], relevance.query_codes, relevance.item_codes, remove_self=relevance.self_Q)


def _cell(cross_version: CrossVersion, relevance: LabelRelevance, verification: bool) -> Cell:
    rates = verification_rates(cross_version.compared, relevance) if verification else {}
    return Cell(cross_version.kinds, _retrieve(cross_version.compared, relevance), rates)


def _independent_retrieval(version: Version, data: Data, relevance: LabelRelevance) -> Retrieval:
    embeddings = embed_version(version, data)
    return _retrieve(Compared(embeddings.queries_QD, embeddings.items_ND, embeddings.space), relevance)


def _upgrade(
    new: str,
    old: str,
    cross_versions: CrossVersions,
    declared: Mapping[tuple[str, str], CrossVersion],
    cells: Mapping[tuple[str, str], Cell],
    relevance: LabelRelevance,
    independent: Retrieval | None,
) -> Upgrade:
    before, after = cells[old, old].retrieval, cells[new, old].retrieval
    hit_before, hit_after = before.hits[1][before.valid], after.hits[1][after.valid]
    return Upgrade(
        difference={metric: gain(after, before, metric) for metric in METRICS},
        p_com={} if independent is None else _p_com(before, after, independent),
        flips=negative_flips(hit_before, hit_after),
        flip_share=mean_interval(hit_before & ~hit_after),
        cka=linear_cka(cross_versions.embeddings[new].items_ND, cross_versions.embeddings[old].items_ND),
        strict=strict_criterion(declared[old, old].compared, declared[new, old].compared, relevance),
    )


def _p_com(before: Retrieval, after: Retrieval, independent: Retrieval) -> dict[str, Score]:
    ratios = {}
    for metric in METRICS:
        old_old, new_old, best = (r.per_query(metric)[r.valid] for r in (before, after, independent))
        ratios[metric] = ratio_interval(new_old - old_old, best - old_old)
    return {metric: score for metric, score in ratios.items() if score is not None}


def _p_up(own: Retrieval, independent: Retrieval) -> dict[str, Score]:
    ratios = {}
    for metric in METRICS:
        new_new, best = (r.per_query(metric)[r.valid] for r in (own, independent))
        ratios[metric] = ratio_interval(new_new - best, best)
    return {metric: score for metric, score in ratios.items() if score is not None}


def _curves(
    new: str,
    old: str,
    cross_versions: CrossVersions,
    relevance: LabelRelevance,
    orders: Sequence[str],
    metric: str,
    points: int,
) -> Iterator[tuple[tuple[str, str, str], MeasuredCurve]]:
    """((kind of backfill, order, "raw" or "calibrated"), curve), see `Evaluation.curves`."""
    possible = _orders(cross_versions, new, old, orders)
    for kind, before, after in _backfills(cross_versions, new, old):
        measured = measure_curves(before, after, relevance, possible, metric=metric, points=points)
        yield from (((kind, *key), curve) for key, curve in measured.items())


def _backfills(cross_versions: CrossVersions, new: str, old: str) -> list[tuple[str, Compared, Compared]]:
    """The possible kinds of backfill, and queries with the items before and after each."""
    unmoved = cross_versions.unmoved(new, old).compared
    reencoded = cross_versions.reencoded(new)
    backfills = [(REENCODE, unmoved, reencoded)]
    if (moved := cross_versions.transformed(new, old)) is not None:
        backfills += [(TRANSFORM, unmoved, moved.compared), (REFINE, moved.compared, reencoded)]
    return backfills


def _orders(cross_versions: CrossVersions, new: str, old: str, orders: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """The possible orders of a backfill; a data set's own order stands for the order in which items were stored."""
    waiting = PendingItems(
        np.arange(len(cross_versions.embeddings[old].items_ND)), cross_versions.uncertainty(new, old)
    )
    possible = [order for order in orders if order != "uncertainty" or waiting.uncertainty is not None]
    return {order: backfill_order(order, waiting) for order in possible}
