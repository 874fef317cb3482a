"""index.merge: the results of several shards as one list."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from index.merge import Merged, merge_raw
from index.shard import MISSING


def result(*pairs: tuple[float, int]) -> tuple[np.ndarray, np.ndarray]:
    """One query's shard result."""
    return np.array([[s for s, _ in pairs]], np.float32), np.array([[k for _, k in pairs]], np.int64)


def parts(merged: Merged) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    np.testing.assert_array_equal(merged.scores_QK, merged.raw_QK)
    return merged.scores_QK, merged.keys_QK, merged.shards_QK


def test_higher_scores_come_first_where_higher_is_better() -> None:
    scores, keys, shards = parts(merge_raw([result((0.9, 1), (0.2, 2)), result((0.5, 3), (0.1, 4))], [True, True], 3))
    np.testing.assert_array_equal(keys, [[1, 3, 2]])
    np.testing.assert_array_equal(shards, [[0, 1, 0]])
    np.testing.assert_allclose(scores, [[0.9, 0.5, 0.2]])


def test_lower_scores_come_first_where_lower_is_better() -> None:
    scores, keys, _ = parts(merge_raw([result((0.2, 1), (0.9, 2)), result((0.1, 3), (0.5, 4))], [False, False], 3))
    np.testing.assert_array_equal(keys, [[3, 1, 4]])
    np.testing.assert_allclose(scores, [[0.1, 0.2, 0.5]])


def test_equal_scores_keep_the_order_of_the_shards() -> None:
    _, keys, _ = parts(merge_raw([result((0.5, 9), (0.5, 8)), result((0.5, 1), (0.5, 2))], [True, True], 4))
    np.testing.assert_array_equal(keys, [[9, 8, 1, 2]])


def test_padding_never_comes_before_a_match_and_has_no_shard() -> None:
    found = [result((-0.9, 5), (0, MISSING)), result((0, MISSING), (0, MISSING))]
    _, keys, shards = parts(merge_raw(found, [True, True], 2))
    np.testing.assert_array_equal(keys, [[5, MISSING]])
    np.testing.assert_array_equal(shards, [[0, -1]])


@settings(max_examples=100, deadline=None)
@given(
    shards=st.lists(
        st.lists(st.floats(-1, 1, width=32), max_size=6).map(lambda s: sorted(s, reverse=True)), min_size=1, max_size=4
    ),
    k=st.integers(1, 6),
    higher=st.booleans(),
)
def test_a_merge_is_the_sort_of_everything(shards: list[list[float]], k: int, higher: bool) -> None:
    found, everything = [], []
    for number, scores in enumerate(shards):
        kept = scores[:k] if higher else scores[::-1][:k]
        padded = [*((s, 100 * number + i) for i, s in enumerate(kept)), *[(0.0, MISSING)] * (k - len(kept))]
        found.append(result(*padded))
        everything += kept
    scores_QK, keys_QK, shards_QK = parts(merge_raw(found, [higher] * len(shards), k))
    expected = sorted(everything, reverse=higher)[:k]
    real = keys_QK[0] != MISSING
    assert keys_QK.shape == (1, k)
    np.testing.assert_array_equal(np.flatnonzero(real), np.arange(len(expected)))
    np.testing.assert_array_equal(scores_QK[0][real], np.array(expected, np.float32))
    np.testing.assert_array_equal(shards_QK[0], np.where(real, keys_QK[0] // 100, -1))
    assert len(set(keys_QK[0][real])) == real.sum()
