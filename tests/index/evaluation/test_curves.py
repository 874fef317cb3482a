"""Backfill curves against a naive twin, their ends, and what calibration is for."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from index.engines.base import Hits, Scanned
from index.evaluation import curves
from index.evaluation.curves import (
    CALIBRATED,
    LABEL_FREE,
    RANK,
    RAW,
    backfill_values,
    curve_values,
    fused_values,
    measure_curves,
)
from index.evaluation.metrics import Compared, retrieval
from index.evaluation.ordering import PendingItems, backfill_order
from index.evaluation.relevance import LabelRelevance
from index.evaluation.score_maps import fit_maps
from index.query.merge import merge_rank
from index.space import Cosine, Euclidean, Lorentz, Space


def naive_values(
    old: np.ndarray, new: np.ndarray, relevant: np.ndarray, order: Sequence[int], metric: str, points: int
) -> np.ndarray:
    """Each point and query by itself: put the costs together, sort (wrong first among equals), read the ranking."""
    values = np.zeros((points, len(old)))
    for point in range(points):
        moved = set(order[: round(point / (points - 1) * len(order))])
        for query in range(len(old)):
            cost = [new[query, i] if i in moved else old[query, i] for i in range(len(order))]
            ranking = [bool(right) for _, right in sorted(zip(cost, relevant[query], strict=True))]
            if metric == "mAP@1.0":
                hits = [sum(ranking[: r + 1]) / (r + 1) for r, right in enumerate(ranking) if right]
                values[point, query] = sum(hits) / max(len(hits), 1)
            else:
                values[point, query] = any(ranking[: int(metric[4:])])
    return values


@pytest.mark.parametrize("metric", ["cmc@1", "cmc@3", "mAP@1.0"])
@pytest.mark.parametrize(("queries", "items", "points"), [(13, 29, 6), (5, 3, 21), (1, 40, 2)])
def test_the_values_of_a_curve_equal_the_naive_twin(metric: str, queries: int, items: int, points: int) -> None:
    generator = np.random.default_rng([queries, items])
    # Few distinct costs, so that right and wrong items often tie.
    old, new = (generator.integers(0, 6, size=(queries, items)).astype(float) for _ in range(2))
    relevant = generator.random((queries, items)) < 0.3
    order = generator.permutation(items)
    given = backfill_values(old, new, relevant, order, metric, points)
    np.testing.assert_allclose(given, naive_values(old, new, relevant, order, metric, points), atol=1e-12)


def naive_fused(
    old: np.ndarray, new: np.ndarray, relevant: np.ndarray, order: Sequence[int], metric: str, points: int
) -> np.ndarray:
    """The places of unmoved and moved items, as shares of their lists sorted alone, become the costs; unmoved first."""
    values = np.zeros((points, len(old)))
    for point in range(points):
        moved = list(order[: round(point / (points - 1) * len(order))])
        unmoved = [i for i in range(len(order)) if i not in moved]
        for query in range(len(old)):
            lists = [
                sorted((cost[query, i], relevant[query, i], i) for i in items)
                for items, cost in ((unmoved, old), (moved, new))
            ]
            fused = [
                (Fraction(1 + place, len(ranked)), shard, i)
                for shard, ranked in enumerate(lists)
                for place, (*_, i) in enumerate(ranked)
            ]
            cost = np.empty((1, len(order)))
            for place, (*_, i) in enumerate(sorted(fused)):
                cost[0, i] = place
            values[point, query] = naive_values(cost, cost, relevant[[query]], order, metric, 2)[0, 0]
    return values


@pytest.mark.parametrize("metric", ["cmc@1", "cmc@3", "mAP@1.0"])
@pytest.mark.parametrize(("queries", "items", "points"), [(13, 29, 6), (5, 3, 21), (1, 40, 2)])
def test_fused_places_equal_the_naive_twin(metric: str, queries: int, items: int, points: int) -> None:
    generator = np.random.default_rng([queries, items])
    # Within a shard right and wrong items tie, so that the wrong one must come first.
    old, new = (generator.integers(0, 6, size=(queries, items)).astype(float) for _ in range(2))
    relevant = generator.random((queries, items)) < 0.3
    order = generator.permutation(items)
    given = fused_values(old, new, relevant, order, metric, points)
    np.testing.assert_allclose(given, naive_fused(old, new, relevant, order, metric, points), atol=1e-12)


def test_fused_places_rank_as_the_gallery_does() -> None:
    """`merge_rank` over the two shards, the older first, puts the same items in the same order."""
    generator = np.random.default_rng(3)
    old, new = generator.random((4, 20)), generator.random((4, 20))
    moved = np.zeros(20, bool)
    moved[generator.permutation(20)[:12]] = True
    order = np.concatenate([np.flatnonzero(moved), np.flatnonzero(~moved)])
    shards = []
    for cost, mine in ((old, np.flatnonzero(~moved)), (new, np.flatnonzero(moved))):
        best = np.argsort(cost[:, mine], axis=1)
        shards.append(Hits(-np.take_along_axis(cost[:, mine], best, axis=1), mine[best], True, Scanned(), len(mine)))
    merged = merge_rank(shards, [8, 12], 20).keys_QK
    relevant = generator.random((4, 20)) < 0.3
    for k in (1, 2, 7):
        at_60_percent = fused_values(old, new, relevant, order, f"cmc@{k}", points=6)[3]
        assert at_60_percent.tolist() == [bool(relevant[q, merged[q, :k]].any()) for q in range(4)]


def relevance(query_codes: Sequence[int], item_codes: Sequence[int], same: bool = False) -> LabelRelevance:
    codes = np.asarray(query_codes)
    return LabelRelevance(codes, np.asarray(item_codes), np.arange(len(codes)) if same else np.full(len(codes), -1))


def draw(space: Space, codes: np.ndarray, noise: float, seed: int, dim: int = 6) -> np.ndarray:
    centres = np.random.default_rng(0).normal(size=(int(codes.max()) + 1, dim))
    vectors = centres[codes] + noise * np.random.default_rng(seed).normal(size=(len(codes), dim))
    return space.normalise(vectors.astype(np.float32))


def two_versions(space: Space, same: bool) -> tuple[Compared, Compared, LabelRelevance]:
    """An old version that is noisy and a new one that is not; the query set differs from the item set unless `same`."""
    generator = np.random.default_rng(1)
    items = generator.integers(5, size=90)
    queries = items if same else generator.integers(6, size=41)  # class 5 is not among the items
    old, new = (
        Compared(draw(space, queries, noise, 2), draw(space, items, noise, 2 if same else 3), space)
        for noise in (1.5, 0.3)
    )
    return old, new, relevance(queries, items, same)


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("space", [Cosine(), Euclidean(), Lorentz(0.7)], ids=str)
@pytest.mark.parametrize("metric", ["cmc@1", "mAP@1.0"])
def test_both_ends_are_the_plain_measurements_in_every_mode(space: Space, same: bool, metric: str) -> None:
    """At 0 % and at 100 % there is one shard, whose order no mode changes."""
    old, new, right = two_versions(space, same)
    orders = {"random": backfill_order("random", PendingItems(np.arange(90)))}
    modes = (RAW, RANK, CALIBRATED, LABEL_FREE)
    measured = curve_values(old, new, right, orders, modes, metric=metric, points=3)
    for way, end in ((old, 0), (new, -1)):
        alone = retrieval(
            way.queries, right.query_codes, way.items, right.item_codes, space, remove_self=right.self_Q
        ).mean(metric)
        for mode in modes:
            assert measured["random", mode][end].mean() == pytest.approx(alone, abs=1e-6)
    assert right.valid.sum() == (90 if same else (right.query_codes < 5).sum())


def test_a_curve_measured_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, right = two_versions(Cosine(), same=False)
    orders = {order: backfill_order(order, PendingItems(np.arange(90))) for order in ("random", "newest")}
    whole = measure_curves(old, new, right, orders, points=5)
    monkeypatch.setattr("index.evaluation.metrics.BLOCK_SCORES", 1500)
    parts = measure_curves(old, new, right, orders, points=5)
    assert set(whole) == {(order, scale) for order in orders for scale in (RAW, CALIBRATED)}
    for key, curve in whole.items():
        assert len(curve.curve.values) == 5
        np.testing.assert_allclose(parts[key].curve.values, curve.curve.values)
        assert parts[key].area == curve.area


def test_the_area_is_the_mean_over_the_backfill_with_an_interval() -> None:
    old, new, right = two_versions(Cosine(), same=False)
    (curve, _) = measure_curves(old, new, right, {"random": np.arange(90)}, points=11).values()
    assert curve.area.value == pytest.approx(curve.curve.area)
    assert curve.area.low < curve.area.value < curve.area.high


def crowded(old: Compared) -> Compared:
    """The same embeddings in a narrow cone."""
    queries, items = (Cosine().normalise(x + 4) for x in (old.queries, old.items))
    return Compared(queries, items, Cosine())


def test_calibration_keeps_poor_scores_of_an_old_version_from_hiding_good_new_ones() -> None:
    """The old space crowds into a narrow cone: its wrong matches score higher than the new version's right ones."""
    old, new, right = two_versions(Cosine(), same=False)
    measured = measure_curves(crowded(old), new, right, {"random": np.arange(90)}, points=11)
    raw, calibrated = measured["random", RAW], measured["random", CALIBRATED]
    assert calibrated.area.low > raw.area.high
    assert calibrated.curve.values[1] > raw.curve.values[1] + 0.05


def test_without_labels_the_crowded_scores_are_told_apart_too() -> None:
    """As above, with twenty classes: the map needs that most random pairs are wrong."""
    generator = np.random.default_rng(1)
    items, queries = generator.integers(20, size=200), generator.integers(20, size=80)
    old, new = (
        Compared(draw(Cosine(), queries, x, 2, 12), draw(Cosine(), items, x, 3, 12), Cosine()) for x in (1.5, 0.3)
    )
    orders = {"random": generator.permutation(200)}
    measured = curve_values(crowded(old), new, relevance(queries, items), orders, (RAW, LABEL_FREE))
    areas = {mode: values.mean() for (_, mode), values in measured.items()}
    assert areas[LABEL_FREE] > areas[RAW] + 0.1


def test_each_query_is_ranked_by_maps_that_never_saw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, right = two_versions(Cosine(), same=False)
    asked: list[np.ndarray] = []

    class Fitted:
        """A map that knows by which queries it was fitted, and their scores."""

        def __init__(self, side: Compared, rows: np.ndarray) -> None:
            self.rows, self.score_QN = rows, side.queries @ side.items.T

        def log_odds(self, score_BN: np.ndarray) -> np.ndarray:
            mine = np.array([np.abs(self.score_QN - one).sum(axis=1).argmin() for one in score_BN])
            assert not set(mine) & set(self.rows)
            asked.append(mine)
            return score_BN

    def fit(shards: Sequence[Compared], _match: object, rows: np.ndarray, _seed: int) -> list[Fitted]:
        assert len(rows) >= 20
        return [Fitted(shard, rows) for shard in shards]

    monkeypatch.setattr(curves, "fit_maps", fit)
    measure_curves(old, new, right, {"random": np.arange(90)}, points=2)
    assert sorted(np.concatenate(asked)) == sorted([*range(41), *range(41)])  # by the maps of each version


def test_a_map_fitted_on_a_draw_of_the_items_is_that_of_all_items(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(5)
    items, queries = generator.integers(8, size=3000), generator.integers(8, size=300)
    side = Compared(draw(Cosine(), queries, 1.0, 1), draw(Cosine(), items, 1.0, 2), Cosine())
    right, rows = relevance(queries, items), np.arange(300)
    drawn = fit_maps([side], right, rows)[0]
    monkeypatch.setattr("index.evaluation.score_maps.BEST", 3000)
    full = fit_maps([side], right, rows)[0]
    at = np.linspace(-0.5, 0.99, 12)
    np.testing.assert_allclose(drawn(at), full(at), atol=0.06)
    assert full(0.99) > 0.6 > 0.2 > full(0.0)


def test_the_items_drawn_stand_for_all_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 0.5 query `a` has its one relevant item, and query `b` a hundred wrong ones, of which one is drawn."""
    monkeypatch.setattr("index.evaluation.score_maps.BEST", 1)
    monkeypatch.setattr("index.evaluation.score_maps.DRAWN", 1)
    degrees = np.deg2rad([120, 60, *[0] * 100])
    items = np.stack([np.cos(degrees), np.sin(degrees)], axis=1).astype(np.float32)
    queries = np.repeat(np.array([[-1, 0], items[1]], np.float32), 100, axis=0)
    right = relevance([0] * 100 + [1] * 100, [0, 1, *[2] * 100])

    (fitted,) = fit_maps([Compared(queries, items, Cosine())], right, np.arange(200))

    assert fitted(0.5) < 0.03
    assert fitted(1.0) > 0.9


def test_a_query_does_not_teach_the_map_that_it_matches_itself() -> None:
    """Every class has one image: seen without itself, no match is ever right."""
    x = draw(Cosine(), np.arange(30), 0.0, 1)
    fitted = fit_maps([Compared(x, x, Cosine())], relevance(range(30), range(30), same=True), np.arange(30))[0]
    assert fitted(0.9) < 0.1
    assert fit_maps([Compared(x, x, Cosine())], relevance(range(30), range(30)), np.arange(30))[0](1.0) > 0.5


def test_a_query_is_valid_when_an_item_other_than_itself_is_right() -> None:
    assert relevance([0, 1, 7], [0, 0, 2]).valid.tolist() == [True, False, False]
    assert relevance([0, 1, 1], [0, 1, 1], same=True).valid.tolist() == [False, True, True]
