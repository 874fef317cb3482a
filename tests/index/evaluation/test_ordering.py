"""index.evaluation.ordering: which items move first, and the curve that gives."""

from __future__ import annotations

import numpy as np
import pytest

from index.errors import InvalidArgument
from index.evaluation.metrics import MEAN_AP, Compared, mixed_retrieval, retrieval
from index.evaluation.ordering import (
    ORDERS,
    BackfillCurve,
    PendingItems,
    backfill_order,
    hyperbolic_uncertainty,
    ranks,
)
from index.space import Cosine

STORED = [30, 10, 20, 10]


def test_orders_by_age_keep_ties_as_they_came() -> None:
    np.testing.assert_array_equal(backfill_order("newest", PendingItems(STORED)), [0, 2, 1, 3])
    np.testing.assert_array_equal(backfill_order("oldest", PendingItems(STORED)), [1, 3, 2, 0])


def test_the_most_uncertain_item_moves_first() -> None:
    waiting = PendingItems(STORED, uncertainty=[0.1, 0.9, 0.5, 0.9])
    np.testing.assert_array_equal(backfill_order("uncertainty", waiting), [1, 3, 2, 0])


@pytest.mark.parametrize("uncertainty", [None, [0.1, 0.2]])
def test_order_by_uncertainty_needs_one_score_an_item(uncertainty: list[float] | None) -> None:
    with pytest.raises(InvalidArgument, match="needs one uncertainty per item") as caught:
        backfill_order("uncertainty", PendingItems(STORED, uncertainty))
    assert caught.value.pointer == "/order"


def test_a_random_order_is_repeatable_and_differs_by_seed() -> None:
    stored = np.arange(50)
    first, again, other = (backfill_order("random", PendingItems(stored, seed=seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first != stored).any()


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_moves_every_item_once(order: str) -> None:
    stored = np.random.default_rng(0).integers(20, size=40)
    moved = backfill_order(order, PendingItems(stored, stored * 0.1, matches=stored % 3, transformed=stored % 2))
    np.testing.assert_array_equal(np.sort(moved), np.arange(40))
    assert backfill_order(order, PendingItems([], [], matches=[], transformed=[])).shape == (0,)


def test_the_most_matched_items_and_those_an_edge_moved_go_first() -> None:
    waiting = PendingItems(STORED, matches=[0, 7, 7, 9], transformed=[False, True, False, True])
    np.testing.assert_array_equal(backfill_order("traffic", waiting), [3, 1, 2, 0])
    np.testing.assert_array_equal(backfill_order("transformed", waiting), [1, 3, 0, 2])


def test_an_unknown_order_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"random, newest, .*, transformed, not 'fastest'"):
        backfill_order("fastest", PendingItems(STORED))


@pytest.mark.parametrize("curvature", [1.0, 4.0])
def test_uncertainty_falls_from_one_with_the_distance_from_the_origin(curvature: float) -> None:
    tangents = np.array([0.0, 0.5, 2.0])
    space_parts = np.sinh(np.sqrt(curvature) * tangents) / np.sqrt(curvature)

    found = hyperbolic_uncertainty(curvature, np.stack([0 * space_parts, -space_parts], axis=1))

    np.testing.assert_allclose(found, 1 - np.tanh(np.sqrt(curvature) * tangents))


def test_a_rank_is_the_share_of_what_lies_below() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [0.5, 0.0, 0.5, 0.25]
    assert ranks([]).tolist() == []


def test_area_and_largest_dip_by_hand() -> None:
    curve = BackfillCurve(np.array([0, 0.5, 0.75, 1]), np.array([0.4, 0.6, 0.3, 0.8]))
    assert curve.area == pytest.approx(0.5 * 0.5 + 0.25 * 0.45 + 0.25 * 0.55)
    assert curve.largest_dip == pytest.approx(0.3)


def test_a_curve_that_starts_by_falling_dips_below_its_start() -> None:
    assert BackfillCurve(np.array([0, 0.5, 1]), np.array([0.5, 0.4, 0.9])).largest_dip == pytest.approx(0.1)


def test_the_ends_of_a_mixed_curve_are_the_pure_answers() -> None:
    """Invariant 4 over arrays: 0 % is old/old's gallery, 100 % is new/new's; query images are not in the gallery."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(5, 8))
    query_labels, item_labels = generator.integers(5, size=40), generator.integers(5, size=100)

    def embed(labels: np.ndarray, noise: float) -> np.ndarray:
        return Cosine().normalise((centres[labels] + noise * generator.normal(size=(len(labels), 8))).astype("f4"))

    queries, old, new = embed(query_labels, 1.0), embed(item_labels, 2.0), embed(item_labels, 0.5)

    order = backfill_order("random", PendingItems(np.arange(100)))

    def measure(count: int) -> float:
        moved = np.isin(np.arange(100), order[:count])
        shards = [Compared(queries, old[~moved], Cosine()), Compared(queries, new[moved], Cosine())]
        labels = np.concatenate([item_labels[~moved], item_labels[moved]])
        return mixed_retrieval(shards, query_labels, labels).mean(MEAN_AP)

    pure = [retrieval(queries, query_labels, items, item_labels, Cosine()).mean(MEAN_AP) for items in (old, new)]
    np.testing.assert_allclose([measure(0), measure(100)], pure)
    assert pure[0] < measure(50) < pure[1]
