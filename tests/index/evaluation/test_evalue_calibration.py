"""evalue_calibration: E-values against counting by hand, the exponential tail, and a map that keeps every order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.edges.calibration import calibration_from_json
from index.errors import InvalidArgument
from index.evaluation.evalue_calibration import fit_evalue


def test_eight_pairs_by_hand() -> None:
    """Of pairs at 1 to 8 all eight reach 1 and two reach 7; of 9 items 8 and 2 are expected to.

    Beyond 7 lies one pair, 1 further on: from there each unit halves the tail, so log-odds rise by log 2.
    """
    fitted = fit_evalue([3, 1, 4, 2, 8, 6, 5, 7], 9, higher_is_better=True)
    np.testing.assert_allclose(fitted.log_odds(np.arange(1, 8)), -np.log(np.arange(8, 1, -1)))
    np.testing.assert_allclose(fitted.log_odds([7, 8, 10, 0]), np.log([1 / 2, 1, 4, 1 / 16]), atol=1e-12)
    np.testing.assert_allclose(fitted([1, 7, 8]), [1 / 9, 1 / 3, 1 / 2])


def test_distances_are_the_mirror_of_similarities() -> None:
    scores = np.random.default_rng(0).normal(size=500)
    up, down = fit_evalue(scores, 99, higher_is_better=True), fit_evalue(-scores, 99, higher_is_better=False)
    at = np.linspace(-6, 6, 100)
    np.testing.assert_allclose(up.log_odds(at), down.log_odds(-at), rtol=1e-12)


def test_between_the_knots_the_map_counts_pairs() -> None:
    scores = np.random.default_rng(1).normal(size=20_000)
    fitted = fit_evalue(scores, 1000, higher_is_better=True)
    for at in (-1.0, -0.5, 0.0, 0.3, 0.65):
        counted = 1000 * (scores >= at).mean()
        assert fitted.log_odds(at) == pytest.approx(-math.log(counted), abs=0.05)


def test_beyond_the_knots_an_exponential_tail_is_found_again() -> None:
    """Exponential scores of mean 1/3: -log tail(s) = 3 s, also where there is no pair."""
    scores = np.random.default_rng(2).exponential(1 / 3, size=50_000)
    fitted = fit_evalue(scores, 1, higher_is_better=True)
    np.testing.assert_allclose(fitted.log_odds([0.3, 1, 5, 10]), [0.9, 3, 15, 30], rtol=0.05)
    assert fitted.slope == pytest.approx(3, rel=0.05)


def test_right_pairs_in_the_sample_are_not_taken_for_chance() -> None:
    """Chance scores alike in two versions; in the second one pair in twelve is right, and far out.

    One pair in 12 reaches 9, by chance one in 10^19 would: the map must see at least half of that distance.
    """
    generator = np.random.default_rng(4)
    chance, other = generator.normal(size=(2, 22_000))
    right = generator.normal(9, 0.5, size=2_000)
    clean = fit_evalue(chance, 1000, higher_is_better=True)
    mixed = fit_evalue(np.concatenate([other, right]), 1000, higher_is_better=True)
    assert mixed.log_odds(9.0) > clean.log_odds(4.5)
    assert clean.slope / 2 < mixed.slope < clean.slope


def test_the_number_of_items_shifts_every_map_alike() -> None:
    generator = np.random.default_rng(3)
    one, other = generator.normal(size=400), generator.normal(2, 3, size=700)
    at = np.linspace(-9, 12, 50)
    gaps = [
        fit_evalue(one, n, higher_is_better=True).log_odds(at)
        - fit_evalue(other, n, higher_is_better=True).log_odds(at)
        for n in (1, 50, 10**9)
    ]
    np.testing.assert_allclose(gaps[1], gaps[0], atol=1e-6)
    np.testing.assert_allclose(gaps[2], gaps[0], atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    scores=st.lists(st.sampled_from([-1.0, -0.25, 0.0, 0.5, 0.75]) | st.floats(-10, 10), min_size=1, max_size=200),
    items=st.integers(1, 10**7),
    higher=st.booleans(),
)
def test_every_map_is_strictly_monotone_and_survives_json(scores: list[float], items: int, higher: bool) -> None:
    fitted = calibration_from_json(fit_evalue(scores, items, higher_is_better=higher).as_json())
    at = np.linspace(-12, 12, 97)
    steps = np.diff(fitted.log_odds(at))
    assert np.isfinite(steps).all()
    assert ((steps if higher else -steps) > 0).all()


@pytest.mark.parametrize("scores", [[], [[1.0]], [1.0, float("nan")], [float("inf")]])
def test_what_are_no_scores_is_refused(scores: list[float]) -> None:
    with pytest.raises(InvalidArgument, match="finite scores of at least one random pair"):
        fit_evalue(scores, 5, higher_is_better=True)


def test_no_items_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="items must be at least 1, not 0"):
        fit_evalue([1.0], 0, higher_is_better=True)
