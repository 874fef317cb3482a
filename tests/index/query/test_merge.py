"""index.query.merge: the results of several shards as one list."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.edges.calibration import Calibration
from index.engines.base import MISSING, Hits, Scanned, is_full
from index.engines.merge_parts import Merged
from index.errors import InvalidArgument, ModeUnavailable
from index.query.merge import Mode, choose_mode, merge_calibrated, merge_rank, merge_raw
from index.space import Cosine, Euclidean, Lorentz


def result(*pairs: tuple[float, int]) -> Hits:
    """One query's shard result."""
    scores, slots = np.array([[s for s, _ in pairs]], np.float32), np.array([[k for _, k in pairs]], np.int64)
    return Hits(scores, slots, is_full(slots), Scanned(), len(pairs))


def parts(merged: Merged) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    np.testing.assert_array_equal(merged.scores_QK, merged.raw_QK)
    return merged.scores_QK, merged.keys_QK, merged.parts_QK


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


def calibration(slope: float, *points: tuple[float, float]) -> Calibration:
    return Calibration(np.array([s for s, _ in points]), np.array([p for _, p in points]), slope)


def naive_log_odds(fitted: Calibration, score: float) -> float:
    """One score: extrapolate before the first knot and behind the last, draw a line between two."""
    knots = list(zip(fitted.scores_K.tolist(), fitted.probabilities_K.tolist(), strict=True))
    if score <= knots[0][0]:
        return math.log(knots[0][1] / (1 - knots[0][1])) + fitted.slope * (score - knots[0][0])
    for (x0, p0), (x1, p1) in itertools.pairwise(knots):
        if score <= x1:
            low, high = math.log(p0 / (1 - p0)), math.log(p1 / (1 - p1))
            return low + (high - low) * (score - x0) / (x1 - x0)
    return math.log(knots[-1][1] / (1 - knots[-1][1])) + fitted.slope * (score - knots[-1][0])


def test_calibrated_matches_rank_by_their_probability() -> None:
    """0.6 is a sure match in the second shard, 0.9 a poor one in the first."""
    maps = [calibration(1.0, (0.9, 0.3)), calibration(1.0, (0.6, 0.9))]
    merged = merge_calibrated([result((0.9, 1), (0.8, 2)), result((0.6, 3), (0.1, 4))], maps, 4)
    np.testing.assert_array_equal(merged.keys_QK, [[3, 4, 1, 2]])
    np.testing.assert_array_equal(merged.parts_QK, [[1, 1, 0, 0]])
    np.testing.assert_allclose(merged.raw_QK, [[0.6, 0.1, 0.9, 0.8]])
    odds = [9, 9 * math.exp(-0.5), 3 / 7, 3 / 7 * math.exp(-0.1)]
    np.testing.assert_allclose(merged.scores_QK, [[o / (1 + o) for o in odds]], rtol=1e-6)


def test_distances_and_similarities_can_be_calibrated_together() -> None:
    maps = [calibration(-2.0, (1.0, 0.5)), calibration(2.0, (0.0, 0.5))]
    merged = merge_calibrated([result((0.5, 1), (3.0, 2)), result((0.9, 3), (-0.5, 4))], maps, 4)
    np.testing.assert_array_equal(merged.keys_QK, [[3, 1, 4, 2]])


def test_probabilities_that_round_to_one_still_rank() -> None:
    maps = [calibration(100.0, (0.0, 0.5)), calibration(101.0, (0.0, 0.5))]
    merged = merge_calibrated([result((0.9, 1), (0.8, 2)), result((0.95, 3), (0.7, 4))], maps, 4)
    np.testing.assert_array_equal(merged.keys_QK, [[3, 1, 2, 4]])
    np.testing.assert_allclose(merged.scores_QK, 1)


def test_ranks_are_fused_by_place() -> None:
    found = [result((0.9, 1), (0.8, 2)), result((7.0, 3), (9.0, 4)), result((0.1, 5), (0, MISSING))]
    merged = merge_rank(found, [10, 10, 10], 5)
    np.testing.assert_array_equal(merged.keys_QK, [[1, 3, 5, 2, 4]])
    np.testing.assert_allclose(merged.scores_QK, [[1 / 63] * 3 + [1 / 66] * 2])
    np.testing.assert_allclose(merged.raw_QK, [[0.9, 7.0, 0.1, 0.8, 9.0]])


def test_a_place_weighs_as_the_share_of_its_shard() -> None:
    """The best of 1 item stands for it all, as the third of 3 does."""
    merged = merge_rank([result((0.9, 1), (0.8, 2), (0.7, 3)), result((0.9, 4), (0, MISSING), (0, MISSING))], [3, 1], 4)
    np.testing.assert_array_equal(merged.keys_QK, [[1, 2, 3, 4]])
    np.testing.assert_allclose(merged.scores_QK, [[1 / (60 + 4 / 3), 1 / (60 + 8 / 3), 1 / 64, 1 / 64]])


SHARDS = st.lists(
    st.tuples(
        st.lists(st.floats(-1, 1, width=32), max_size=6),
        st.booleans(),
        st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3, unique=True).map(sorted),
        st.floats(0.1, 20),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(shards=SHARDS, k=st.integers(1, 8), mode=st.sampled_from([Mode.CALIBRATED, Mode.RANK]))
def test_each_mode_equals_a_sort_of_everything_and_keeps_the_order_of_every_shard(
    shards: list[tuple[list[float], bool, list[float], float]], k: int, mode: Mode
) -> None:
    found, maps, everything = [], [], []
    sizes = [len(scores) for scores, *_ in shards]
    size = sum(sizes)
    for number, (scores, higher, rates, slope) in enumerate(shards):
        knots = list(zip(np.linspace(-0.5, 0.5, len(rates)), rates if higher else rates[::-1], strict=True))
        maps.append(calibration(slope if higher else -slope, *knots))
        best = sorted(scores, reverse=higher)[:k]
        found.append(result(*((s, 100 * number + i) for i, s in enumerate(best)), *[(0.0, MISSING)] * (k - len(best))))
        for place, score in enumerate(best):
            good = (
                naive_log_odds(maps[-1], score)
                if mode is Mode.CALIBRATED
                else 1 / (60 + (place + 1) * size / len(scores))
            )
            everything.append((good, 100 * number + place))
    merged = merge_calibrated(found, maps, k) if mode is Mode.CALIBRATED else merge_rank(found, sizes, k)
    goodness = {key: good for good, key in everything}
    keys = [key for key in merged.keys_QK[0].tolist() if key != MISSING]
    assert (len(set(keys)), merged.keys_QK.shape) == (min(k, len(everything)), (1, k))
    expected = sorted(goodness.values(), reverse=True)[:k]
    np.testing.assert_allclose([goodness[key] for key in keys], expected, atol=1e-9)
    shown = 1 / (1 + np.exp(-np.array(expected))) if mode is Mode.CALIBRATED else expected
    np.testing.assert_allclose(merged.scores_QK[0][: len(keys)], shown, atol=1e-9)
    for number in range(len(shards)):
        own = [key for key in keys if key // 100 == number]
        assert own == list(range(100 * number, 100 * number + len(own)))
    shards_of = [key // 100 if key != MISSING else -1 for key in merged.keys_QK[0]]
    np.testing.assert_array_equal(merged.parts_QK[0], shards_of)


def test_the_mode_is_the_first_that_is_possible() -> None:
    alike, unlike = [Lorentz(1.0), Lorentz(2.0)], [Lorentz(1.0), Euclidean()]
    assert choose_mode(None, alike, True) is Mode.CALIBRATED
    assert choose_mode(None, alike, False) is Mode.RAW
    assert choose_mode(None, unlike, True) is Mode.CALIBRATED
    assert choose_mode(None, unlike, False) is Mode.RANK
    assert choose_mode("raw", alike, True) is Mode.RAW
    assert choose_mode("rank", [Cosine()], True) is Mode.RANK
    assert choose_mode(None, alike, True, Mode.RAW) is Mode.RAW
    assert choose_mode(None, unlike, True, Mode.RAW) is Mode.CALIBRATED
    assert choose_mode("calibrated", alike, True, Mode.RAW) is Mode.CALIBRATED


def test_a_mode_that_is_not_possible_is_refused_with_the_reason_and_the_legal_ones() -> None:
    with pytest.raises(ModeUnavailable, match=r"some items have no calibration.*legal now: raw, rank") as caught:
        choose_mode("calibrated", [Cosine()], False)
    assert (caught.value.pointer, caught.value.status) == ("/mode", 409)
    with pytest.raises(ModeUnavailable, match="spaces cosine and l2 are not comparable; legal now: rank"):
        choose_mode("raw", [Cosine(), Euclidean()], False)
    with pytest.raises(InvalidArgument, match="mode must be one of calibrated, raw, rank, not 'magic'"):
        choose_mode("magic", [Cosine()], True)
