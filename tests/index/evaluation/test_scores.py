from __future__ import annotations

import numpy as np
import pytest

from index.evaluation.metrics import MEAN_AP, Retrieval
from index.evaluation.scores import compatibility, gain, scores
from index.version import Score


def retrieved(hits: list[bool], valid: list[bool]) -> Retrieval:
    first = np.array(hits)
    return Retrieval({1: first, 5: np.ones(len(hits), bool)}, first / 2, np.array(valid))


BETTER = retrieved([True, True, True, False], [True, True, True, False])
WORSE = retrieved([False, True, False, True], [True, True, False, True])


def test_the_gain_compares_the_queries_that_count_on_both_sides() -> None:
    assert gain(BETTER, WORSE).value == pytest.approx(0.5)
    assert gain(WORSE, BETTER).value == pytest.approx(-0.5)
    assert gain(BETTER, WORSE, MEAN_AP).value == pytest.approx(0.25)


def test_scores_are_of_the_queries_that_count() -> None:
    told = scores(WORSE)

    assert {metric: score.value for metric, score in told.items()} == {
        "cmc@1": pytest.approx(2 / 3),
        "cmc@5": 1,
        "mAP@1.0": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.01, 0.2, "compatible"),
        (0.0, 0.2, "perhaps compatible"),
        (-0.1, 0.2, "perhaps compatible"),
        (-0.1, 0.0, "not compatible"),
    ],
)
def test_a_version_is_compatible_if_the_interval_of_its_gain_lies_above_zero(
    low: float, high: float, verdict: str
) -> None:
    assert compatibility(Score(0.05, low, high)) == verdict
