"""index.agreement: how far two rankings agree."""

from __future__ import annotations

import numpy as np
import pytest

from index.agreement import first_match_flips, overlap, rank_correlation


def naive_rho(old: list[int], new: list[int]) -> float:
    """Spearman's rho as the correlation coefficient of the two rank vectors."""
    both = [key for key in old if key in new and key != -1]
    a = [sorted(both, key=old.index).index(key) for key in both]
    b = [sorted(both, key=new.index).index(key) for key in both]
    return float(np.corrcoef(a, b)[0, 1])


def test_by_hand() -> None:
    old = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, -1, -1], [-1, -1, -1, -1]])
    new = np.array([[1, 2, 3, 4], [4, 3, 2, 1], [7, 5, -1, -1], [1, -1, -1, -1]])

    np.testing.assert_allclose(overlap(old, new), [1.0, 1.0, 0.5, np.nan])
    np.testing.assert_allclose(rank_correlation(old, new), [1.0, -1.0, np.nan, np.nan])
    assert first_match_flips(old, new) == 3


@pytest.mark.parametrize("seed", range(5))
def test_random_rankings_against_the_naive_version(seed: int) -> None:
    draw = np.random.default_rng(seed)
    old = np.stack([draw.permutation(30)[:10] for _ in range(8)])
    new = np.stack([draw.permutation(30)[:10] for _ in range(8)])

    for row, (a, b) in enumerate(zip(old.tolist(), new.tolist(), strict=True)):
        both = set(a) & set(b)
        assert overlap(old, new)[row] == pytest.approx(len(both) / 10)
        if len(both) >= 2:
            assert rank_correlation(old, new)[row] == pytest.approx(naive_rho(a, b))
        else:
            assert np.isnan(rank_correlation(old, new)[row])


def test_missing_results_count_for_nothing() -> None:
    old, new = np.array([[3, 4, -1]]), np.array([[4, 3, -1]])

    assert overlap(old, new)[0] == 1.0
    assert rank_correlation(old, new)[0] == -1.0
