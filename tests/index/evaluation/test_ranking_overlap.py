"""index.evaluation.ranking_overlap: how far two rankings agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from index.evaluation.ranking_overlap import first_match_flips, overlap, rank_correlation


def naive_tau(old: list[int], new: list[int]) -> float:
    """1 - 2 K / pairs, K by the four cases of "Comparing top k lists" with penalty 1/2, in loops."""
    old, new = ([key for key in ranking if key != -1] for ranking in (old, new))
    pairs = list(itertools.combinations(sorted({*old, *new}), 2))
    distance = 0.0
    for i, j in pairs:
        if {i, j} <= set(old) & set(new):
            distance += (old.index(i) < old.index(j)) != (new.index(i) < new.index(j))
        elif {i, j} <= set(old) or {i, j} <= set(new):
            whole, other = (old, new) if {i, j} <= set(old) else (new, old)
            ahead = i if whole.index(i) < whole.index(j) else j
            held = {i, j} & set(other)
            distance += 0.5 if not held else float(held != {ahead})
        else:
            distance += 1.0
    return 1 - 2 * distance / len(pairs)


def test_by_hand() -> None:
    old = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, -1, -1], [-1, -1, -1, -1]])
    new = np.array([[1, 2, 3, 4], [4, 3, 2, 1], [7, 5, -1, -1], [1, -1, -1, -1]])

    np.testing.assert_allclose(overlap(old, new), [1.0, 1.0, 0.5, np.nan])
    np.testing.assert_allclose(rank_correlation(old, new), [1.0, -1.0, -1 / 3, np.nan])
    assert first_match_flips(old, new) == 3


@pytest.mark.parametrize("seed", range(5))
def test_random_rankings_against_the_naive_version(seed: int) -> None:
    draw = np.random.default_rng(seed)
    old = np.stack([draw.permutation(30)[:10] for _ in range(8)])
    new = np.stack([draw.permutation(30)[:10] for _ in range(8)])

    for row, (a, b) in enumerate(zip(old.tolist(), new.tolist(), strict=True)):
        both = set(a) & set(b)
        assert overlap(old, new)[row] == pytest.approx(len(both) / 10)
        assert rank_correlation(old, new)[row] == pytest.approx(naive_tau(a, b))


def test_lists_with_nothing_in_common_are_about_minus_one_half() -> None:
    k = 50
    assert rank_correlation(np.arange(k)[None], np.arange(k, 2 * k)[None])[0] == pytest.approx(-k / (2 * k - 1))


def test_missing_results_count_for_nothing() -> None:
    old, new = np.array([[3, 4, -1]]), np.array([[4, 3, -1]])

    assert overlap(old, new)[0] == 1.0
    assert rank_correlation(old, new)[0] == -1.0


def test_two_empty_rankings_differ_in_nothing() -> None:
    nothing = np.empty((2, 0), np.int64)
    assert first_match_flips(nothing, nothing) == 0
    assert np.isnan(overlap(nothing, nothing)).all()
    assert np.isnan(rank_correlation(nothing, nothing)).all()
