from __future__ import annotations

import numpy as np
import pytest

from index.evaluation.metrics import MEAN_AP, Retrieval
from index.evaluation.scores import gain, scores


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
