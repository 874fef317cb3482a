"""index.evaluation.verification: hand-computed points and twins that try every threshold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive
from index.errors import InvalidArgument
from index.evaluation.verification import best_scores, tar_at_far, tpir_at_fpir
from index.space import Cosine, Euclidean

few_scores = st.lists(st.integers(0, 6), min_size=1, max_size=15)
# Rates closer to a step than rounding can tell belong to either side of it.
targets = st.integers(0, 1000).map(lambda n: n / 1000)


def pairs(genuine: list[float], impostor: list[float]) -> tuple[list[float], list[bool]]:
    return [*genuine, *impostor], [True] * len(genuine) + [False] * len(impostor)


def test_tar_by_hand() -> None:
    """Ten impostors at 0.0 ... 0.9; FAR 0.1 lets one pass, so the threshold lies above 0.8."""
    scores, same = pairs([0.95, 0.85, 0.8, 0.35], [i / 10 for i in range(10)])
    np.testing.assert_allclose(tar_at_far(scores, same, [0, 0.1, 0.5, 1]), [0.25, 0.5, 0.75, 1])


def test_impostors_that_tie_are_all_let_in_or_all_kept_out() -> None:
    scores, same = pairs([0.9, 0.5, 0.0], [0.5, 0.5, 0.0, 0.0])
    np.testing.assert_allclose(tar_at_far(scores, same, [0.25, 0.5]), [1 / 3, 2 / 3])


def test_a_target_that_is_a_whole_number_of_impostors_is_met_despite_rounding() -> None:
    scores, same = pairs([0.705], [i / 100 for i in range(100)])
    assert 0.29 * 100 < 29
    np.testing.assert_array_equal(tar_at_far(scores, same, [0.28, 0.29]), [0, 1])


@settings(max_examples=200, deadline=None)
@given(genuine=few_scores, impostor=few_scores, far=targets)
def test_tar_equals_trying_every_threshold(genuine: list[float], impostor: list[float], far: float) -> None:
    scores, same = pairs(genuine, impostor)
    assert tar_at_far(scores, same, [far])[0] == pytest.approx(naive.tar(genuine, impostor, far))


def test_interpolated_tar_lies_on_the_line_between_two_thresholds() -> None:
    """ROC corners (FAR, TAR): (0, 0.5) at 0.9, (0.5, 0.5) at 0.6, (0.5, 1) at 0.4, (1, 1) at 0.2."""
    scores, same = pairs([0.9, 0.4], [0.6, 0.2])
    np.testing.assert_allclose(tar_at_far(scores, same, [0, 0.25, 0.5, 0.75, 1], interp=True), [0.5, 0.5, 1, 1, 1])
    scores, same = pairs([0.9, 0.5], [0.5, 0.2])  # one tie moves both rates at once
    np.testing.assert_allclose(tar_at_far(scores, same, [0, 0.1, 0.5], interp=True), [0.5, 0.6, 1])


@pytest.mark.parametrize("impostors", range(1, 30))
def test_interpolation_reaches_the_exact_rate_at_every_step(impostors: int) -> None:
    """Each genuine pair lies between two impostors: a line ends where the exact rate steps up, and not before it."""
    scores, same = pairs([n + 0.5 for n in range(impostors)], list(range(impostors)))
    fars = [passing / impostors for passing in range(impostors)]

    np.testing.assert_allclose(tar_at_far(scores, same, fars, interp=True), tar_at_far(scores, same, fars))


@settings(max_examples=100, deadline=None)
@given(genuine=few_scores, impostor=few_scores, far=targets)
def test_interpolation_never_falls_below_the_exact_rate(
    genuine: list[float], impostor: list[float], far: float
) -> None:
    scores, same = pairs(genuine, impostor)
    exact, between = tar_at_far(scores, same, [far])[0], tar_at_far(scores, same, [far], interp=True)[0]
    assert exact - 1e-9 <= between <= 1


@pytest.mark.parametrize("same", [[True, True], [False, False]])
def test_a_rate_needs_both_sides(same: list[bool]) -> None:
    with pytest.raises(InvalidArgument, match="both sides"):
        tar_at_far([0.1, 0.2], same, [0.1])


def naive_tpir(cost: np.ndarray, query_labels: list[int], item_labels: list[int], fpir: float, any_rank: bool) -> float:
    """Try every threshold on the whole score table, worst case among ties."""
    scores = -cost
    own = np.equal.outer(np.array(query_labels), np.array(item_labels))
    stored = own.any(axis=1)
    best = 0.0
    for threshold in [*scores.ravel(), np.inf]:
        if np.mean(scores[~stored].max(axis=1) >= threshold) > fpir + 1e-12:
            continue
        hits = []
        for q in np.flatnonzero(stored):
            right, wrong = scores[q][own[q]].max(), scores[q][~own[q]].max(initial=-np.inf)
            hits.append(right >= threshold and (any_rank or right > wrong))
        best = max(best, float(np.mean(hits)))
    return best


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), fpir=targets, any_rank=st.booleans())
def test_tpir_equals_trying_every_threshold(seed: int, fpir: float, any_rank: bool) -> None:
    generator = np.random.default_rng(seed)
    query_labels, item_labels = [0, 0, 1, 2, 3, 8, 9, 9], [*generator.integers(0, 4, size=10), 0]
    q, x = (generator.integers(-3, 4, size=(n, 2)).astype(np.float32) for n in (8, 11))
    cost = ((q[:, None] - x) ** 2).sum(-1)
    given_rate = tpir_at_fpir(*best_scores(q, query_labels, x, item_labels, Euclidean()), [fpir], any_rank=any_rank)
    assert given_rate[0] == pytest.approx(naive_tpir(cost, query_labels, item_labels, fpir, any_rank))


def test_rank_one_needs_the_own_item_first_and_any_rank_does_not() -> None:
    own, other = np.array([0.9, 0.6, -np.inf, -np.inf]), np.array([0.1, 0.8, 0.5, 0.2])
    np.testing.assert_array_equal(tpir_at_fpir(own, other, [0, 0.5, 1]), [0.5, 0.5, 0.5])
    np.testing.assert_array_equal(tpir_at_fpir(own, other, [0, 0.5, 1], any_rank=True), [1, 1, 1])


def test_best_scores_are_higher_for_better_and_minus_infinity_without_an_item() -> None:
    q, x = np.array([[1, 0], [0, 1]], np.float32), np.array([[1, 0], [0.6, 0.8]], np.float32)
    own, other = best_scores(q, ["a", "z"], x, ["a", "b"], Cosine())
    np.testing.assert_allclose(own, [1, -np.inf])
    np.testing.assert_allclose(other, [0.6, 0.8])
