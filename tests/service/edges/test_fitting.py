"""service.upgrades.gates.maps: the pairs that calibrations are fitted on."""

from __future__ import annotations

import numpy as np
import pytest

from service.upgrades.gates.maps import PAIRS, draw_pairs


@pytest.mark.parametrize("counts", [[4, 4], [1, 2, 7, 30], [2, 1, 1, 1, 1, 1]])
def test_pairs_of_one_label_and_of_others_stand_for_all_there_are(counts: list[int]) -> None:
    labels = [f"c{c}" for c, count in enumerate(counts) for _ in range(count)]
    size = len(labels)
    named = np.array(labels)

    pairs = draw_pairs(labels, size, seed=1)

    assert pairs.right is not None
    assert pairs.weights is not None
    assert (pairs.queries != pairs.items).all()
    np.testing.assert_array_equal(named[pairs.queries] == named[pairs.items], pairs.right)
    same = sum(count * (count - 1) for count in counts)
    assert pairs.weights[pairs.right].sum() == pytest.approx(same)
    assert pairs.weights[~pairs.right].sum() == pytest.approx(size * (size - 1) - same)


def test_pairs_of_one_label_are_drawn_alike() -> None:
    labels = ["a"] * 2 + ["b"] * 3 + ["c"]

    pairs = draw_pairs(labels, 6, seed=0)

    assert pairs.right is not None
    drawn = np.stack([pairs.queries, pairs.items])[:, pairs.right].T
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(found) == 2 + 6
    assert counts == pytest.approx(PAIRS / 8, rel=0.1)


def test_without_labels_any_other_entry_is_as_likely() -> None:
    pairs = draw_pairs(None, 5, seed=0)

    assert pairs.right is None
    found, counts = np.unique(np.stack([pairs.queries, pairs.items]).T, axis=0, return_counts=True)
    assert len(found) == 5 * 4
    assert counts == pytest.approx(PAIRS / 20, rel=0.15)
