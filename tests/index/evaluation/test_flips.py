from __future__ import annotations

import numpy as np
import pytest

from index.evaluation.flips import Flip, worst_flips
from index.evaluation.metrics import Compared, Retrieval, retrieval
from index.evaluation.relevance import LabelRelevance
from index.space import Euclidean

PLACES = np.array([[0], [1], [2], [10], [11], [12], [5], [5]], np.float32)
LABELS = [0, 0, 0, 1, 1, 1, 2, 2]


def measured(queries: np.ndarray) -> Retrieval:
    alone = range(len(queries))
    return retrieval(queries, LABELS[: len(queries)], PLACES, LABELS, Euclidean(), remove_self=alone)


@pytest.mark.parametrize("most", [0, 1, 2, 9])
def test_the_deepest_fall_comes_first_with_what_was_found_instead(most: int) -> None:
    # 0 and 3 fall beside the two of class 2, the others stay.
    moved = np.array([[4.9], [1], [2], [5.1], [11], [12]], np.float32)
    shard = Compared(moved, PLACES, Euclidean())
    codes = np.asarray(LABELS)
    right = LabelRelevance(codes[:6], codes, np.arange(6))

    flips = worst_flips(measured(PLACES[:6]), measured(moved), shard, right, most)

    # Query 3 meets both at 5 and those at 2, 1 and 0 before the one at 11; query 0 both at 5 before the one at 2.
    assert flips == [Flip(3, 6, 6), Flip(0, 6, 3)][:most]


def test_among_equals_the_wrong_one_comes_first_and_what_was_wrong_before_is_no_flip() -> None:
    items = np.array([[0], [0], [2], [9], [9]], np.float32)
    labels = [0, 1, 0, 1, 2]
    old, new = np.array([[1.9], [9]], np.float32), np.array([[0], [9]], np.float32)
    before, after = (retrieval(q, [0, 3], items, labels, Euclidean()) for q in (old, new))
    right = LabelRelevance(np.array([0, 3]), np.asarray(labels), np.array([-1, -1]))

    assert worst_flips(before, after, Compared(new, items, Euclidean()), right, 12) == [Flip(0, 1, 2)]
