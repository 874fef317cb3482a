"""index.engines.memory.tuning: what is measured of an index when it is built."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from index.engines.base import MISSING
from index.engines.config import IndexKind, Storage
from index.engines.memory.approximate import build
from index.engines.memory.tuning import (
    TunedIndex,
    _reaches,
    _weights,
    filter_allowed,
    found_mask,
    max_expected,
    oversampled,
    search_depth,
)


def test_found_is_a_row_itself_or_another_that_is_as_near() -> None:
    right = np.array([[0.9, 0.8, 0.8]], np.float32), np.array([[1, 2, 3]])
    for at, scores, found in (
        ([1, 2, 3], [0.9, 0.8, 0.8], [True, True, True]),
        ([1, 7, 8], [0.9, 0.8, 0.8], [True, True, True]),
        ([2, 3, 4], [0.8, 0.8, 0.7], [False, True, True]),
        ([1, MISSING, MISSING], [0.9, 9.0, 9.0], [True, False, False]),
    ):
        answer = np.array([scores], np.float32), np.array([at])
        assert found_mask(right, answer, higher_is_better=True).tolist() == [found]
        turned = (-right[0], right[1]), (-answer[0], answer[1])
        assert found_mask(*turned, higher_is_better=False).tolist() == [found]


def test_a_rank_counts_as_often_as_it_is_in_a_list_over_parts() -> None:
    assert _weights(2, 1.0).tolist() == [0.5, 0.5]
    np.testing.assert_allclose(_weights(2, 0.5), [0.75, 0.25])  # at least one of two: 3/4, both: 1/4

    most, depth = max_expected(10, 0.25), search_depth(10, 0.25)
    drawn = np.random.default_rng(0).random((200_000, 10)) < 0.25
    given = drawn.sum(axis=1)
    # Where it gives more than expected it is asked again.
    tail = np.array([((given >= rank) & (given <= most)).mean() for rank in range(1, depth + 1)])
    np.testing.assert_allclose(_weights(10, 0.25), tail / tail.sum(), atol=2e-3)


@pytest.mark.parametrize("share", [1.0, 0.9, 0.5, 0.25, 0.01])
def test_more_of_a_list_than_expected_is_rare(share: float) -> None:
    most = max_expected(10, share)
    given = np.random.default_rng(1).binomial(10, share, 10_000)
    assert 1 <= most <= 10
    assert (given > most).mean() < 0.15


def test_longer_lists_take_what_was_measured_and_in_between_a_power_of_their_length() -> None:
    rows = np.eye(8, dtype=np.float32)
    index = build(IndexKind.HNSW, Storage.FLOAT32, rows, inner_product=True, stopped=lambda: False)
    assert index is not None
    tuned = TunedIndex(index, [12, 12, 9, 9], 0.99, aims=[8, 8, 8, 8, 12, 24], long=[36, 120])

    assert [tuned.effort_for(1.0, k) for k in (1, 10, 30, 100)] == pytest.approx([12, 12, 36, 120])
    assert tuned.effort_for(1.0, 11) == pytest.approx(12 * 1.1)
    assert tuned.effort_for(1.0, 30, 0.995) == pytest.approx(72)
    assert [tuned.effort_for(1.0, k, 0.9) for k in (10, 30)] == pytest.approx([8, 36])
    assert tuned.effort_for(0.25, 30) == pytest.approx(27)
    assert tuned.effort_for(1.0, 101) == math.inf  # a thousand were found for less by comparing every row
    assert TunedIndex(index, [2, 2, 2, 2], 0.99, long=[3, 4, 5]).effort_for(1.0, 2000) == 2000  # a graph finds no more


@pytest.mark.parametrize("share", [0.999, 0.5, 0.1, 0.01])
def test_a_list_is_widened_so_that_enough_of_it_may_be_found_as_a_rule(share: float) -> None:
    wide = oversampled(10, share)
    assert 10 / share < wide < 30 / share
    left = np.random.default_rng(0).binomial(wide, share, 100_000)
    assert (left < 10).mean() < 0.01
    assert oversampled(10, 1.0) == 10


def test_only_what_may_be_found_is_left_in_its_order() -> None:
    allowed = np.array([True, False, True, True, False])
    found = np.array([[5, 4, 3, 2], [5, 4, 3, 0]], np.float32), np.array([[0, 1, 2, 3], [4, 1, 3, MISSING]])

    scores, at = filter_allowed(allowed, found, 2)

    assert at.tolist() == [[0, 2], [3, MISSING]]
    assert scores[0].tolist() == [5, 3]
    assert scores[1, 0] == 3


@pytest.mark.parametrize(
    ("mean", "spread", "reached", "looked_at"),
    [(1.0, 0.0, True, 256), (0.5, 0.1, False, 256), (0.991, 0.05, False, 2048), (0.991, 0.0155, True, 1024)],
)
def test_an_effort_is_tried_until_it_is_plain_what_it_reaches(
    mean: float, spread: float, reached: bool, looked_at: int
) -> None:
    asked: list[int] = []

    def recalls(queries: int) -> NDArray[np.float64]:
        asked.append(queries)
        return mean + spread * np.tile([1.0, -1.0], queries // 2)

    enough, measured = _reaches(0.99, recalls, 2048)
    assert enough is reached
    assert measured == pytest.approx(mean)
    assert asked == [queries for queries in (256, 512, 1024, 2048) if queries <= looked_at]
