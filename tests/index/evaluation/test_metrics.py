"""index.evaluation.metrics: hand-computed points, and naive float64 twins written from the definitions."""

from __future__ import annotations

import math
import time
import tracemalloc
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive
from index.engines.memory.flat import FlatShard
from index.errors import InvalidArgument
from index.evaluation import metrics as evaluation
from index.evaluation.metrics import (
    MEAN_AP,
    Compared,
    Retrieval,
    comparable,
    compatibility_matrix,
    costs,
    linear_cka,
    mean_interval,
    mixed_retrieval,
    negative_flips,
    p_com,
    p_up,
    paired_bootstrap,
    retrieval,
    retrieval_from_rankings,
    scores_of,
    t_interval,
    update_gain,
)
from index.space import Cosine, Euclidean, Lorentz, Space

SPACES = [Cosine(), Euclidean(), Lorentz(1.0), Lorentz(0.3)]


def assert_equals_naive(given: Retrieval, expected: list[tuple[dict[int, bool], float] | None]) -> None:
    np.testing.assert_array_equal(given.valid, [e is not None for e in expected])
    assert given.skipped == sum(e is None for e in expected)
    for row, answer in enumerate(expected):
        if answer is None:
            continue
        hits, ap = answer
        assert {k: bool(hit[row]) for k, hit in given.hits.items()} == hits
        assert given.ap[row] == pytest.approx(ap, abs=1e-12)
    kept = [e for e in expected if e is not None]
    for k in given.hits:
        assert given.cmc(k) == pytest.approx(np.mean([hits[k] for hits, _ in kept]))
    assert given.mean(MEAN_AP) == pytest.approx(np.mean([ap for _, ap in kept]))


def vectors(space: Space, count: int, dim: int, generator: np.random.Generator) -> np.ndarray:
    return space.normalise(generator.normal(size=(count, dim)).astype(np.float32))


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize(("queries", "items"), [(37, 53), (53, 37), (1, 20), (20, 1)])
@pytest.mark.parametrize("block", [None, 1, 7])
def test_retrieval_equals_the_naive_twin(space: Space, queries: int, items: int, block: int | None) -> None:
    generator = np.random.default_rng([queries, items])
    q, x = vectors(space, queries, 6, generator), vectors(space, items, 6, generator)
    query_labels, item_labels = generator.integers(6, size=queries), generator.integers(5, size=items)
    removed = generator.integers(-1, items, size=queries)
    expected = naive.retrieval(naive.costs(q, x, space), query_labels, item_labels, removed, (1, 3, 5))
    if not any(expected):
        pytest.skip("no query has a correct item")
    given = retrieval(q, query_labels, x, item_labels, space, remove_self=removed, ks=(1, 3, 5), block=block)
    assert_equals_naive(given, expected)


@settings(max_examples=60, deadline=None)
@given(
    query_labels=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    item_labels=st.lists(st.integers(0, 3), min_size=1, max_size=25),
    seed=st.integers(0, 10**6),
)
def test_retrieval_without_removing_equals_the_naive_twin(
    query_labels: list[int], item_labels: list[int], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    q, x = (vectors(Cosine(), len(labels), 4, generator) for labels in (query_labels, item_labels))
    given = retrieval(q, query_labels, x, item_labels, Cosine(), block=3)
    cost = naive.costs(q, x, Cosine())
    expected = naive.retrieval(cost, query_labels, item_labels, [-1] * len(q), (1, 5))
    np.testing.assert_array_equal(given.valid, [e is not None for e in expected])
    np.testing.assert_allclose(given.ap, [e[1] if e else 0 for e in expected], atol=1e-12)


def on_a_line(*places: float) -> np.ndarray:
    return np.array(places, np.float32)[:, None]


def test_a_ranking_by_hand() -> None:
    """One query at 0; items at 1 2 3 4 5 are wrong right wrong right right: AP = (1/2 + 2/4 + 3/5) / 3."""
    given = retrieval(on_a_line(0), ["a"], on_a_line(4, 1, 5, 2, 3), ["a", "b", "a", "a", "b"], Euclidean())
    assert given.mean(MEAN_AP) == pytest.approx((1 / 2 + 2 / 4 + 3 / 5) / 3)
    assert (given.cmc(1), given.cmc(5)) == (0, 1)


def test_query_and_item_sets_may_differ_in_number_and_labels() -> None:
    """Two queries, four items; the second query's class is not among the items and is skipped, not a miss."""
    given = retrieval(on_a_line(0, 1), ["a", "z"], on_a_line(0.1, 0.9, 2, 3), ["a", "b", "b", "a"], Euclidean())
    assert given.skipped == 1
    np.testing.assert_array_equal(given.valid, [True, False])
    assert given.cmc(1) == 1
    assert given.mean(MEAN_AP) == pytest.approx((1 + 2 / 4) / 2)


def test_equal_label_lists_do_not_remove_anything() -> None:
    """Self-removal is by identity and explicit: the same labels on both sides are no reason to drop the diagonal."""
    items, queries, labels = on_a_line(0, 10), on_a_line(9, 1), ["a", "b"]
    assert retrieval(queries, labels, items, labels, Euclidean()).cmc(1) == 0
    same = retrieval(items, labels, items, labels, Euclidean())
    assert same.cmc(1) == 1
    assert same.skipped == 0


def test_removing_the_query_itself_leaves_the_others_of_its_class() -> None:
    x, labels = on_a_line(0, 1, 1.4, 5), ["a", "b", "a", "c"]
    given = retrieval(x, labels, x, labels, Euclidean(), remove_self=np.arange(4))
    np.testing.assert_array_equal(given.valid, [True, False, True, False])
    assert given.cmc(1) == 0
    np.testing.assert_allclose(given.ap[[0, 2]], 1 / 2)


def test_items_that_score_the_same_are_ranked_worst_case_first() -> None:
    collapsed = np.ones((4, 2), np.float32)
    given = retrieval(collapsed[:1], [1], collapsed, [1, 0, 1, 0], Euclidean())
    assert given.cmc(1) == 0
    assert given.mean(MEAN_AP) == pytest.approx((1 / 3 + 2 / 4) / 2)


def test_negative_and_positive_zero_scores_tie() -> None:
    """Products of 1e-60 and -1e-60 round to 0 and -0."""
    q, x = np.array([[1e-30, 0]], np.float32), np.array([[1e-30, 1], [-1e-30, 1]], np.float32)
    for labels in ([1, 0], [0, 1]):
        assert retrieval(q, [1], x, labels, Cosine()).cmc(1) == 0


def test_a_skipped_query_is_not_in_the_mean_and_no_query_gives_nan() -> None:
    given = retrieval(on_a_line(0), [9], on_a_line(1), [1], Euclidean())
    assert np.isnan(given.cmc(1))
    assert np.isnan(given.mean(MEAN_AP))
    empty = retrieval(np.empty((0, 1), np.float32), [], on_a_line(1), [1], Euclidean())
    assert empty.valid.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries_QD": np.zeros((2, 3), np.float32)}, "differ in width: 3 and 2"),
        ({"queries_QD": np.array([[np.nan, 0], [0, 0]], np.float32)}, "finite"),
        ({"items_ND": np.full((3, 2), np.inf, np.float32)}, "finite"),
        ({"query_labels": [1]}, "labels need one entry"),
        ({"item_labels": [1, 2]}, "labels need one entry"),
        ({"remove_self": [0]}, "remove_self"),
        ({"remove_self": [0, 3]}, "below 3"),
        ({"remove_self": [0, -2]}, "or -1"),
        ({"ks": (0,)}, "at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {
        "queries_QD": np.zeros((2, 2), np.float32),
        "query_labels": [1, 2],
        "items_ND": np.zeros((3, 2), np.float32),
        "item_labels": [1, 2, 3],
        "space": Euclidean(),
    }
    retrieval(**arguments)
    with pytest.raises(InvalidArgument, match=message):
        retrieval(**{**arguments, **change})


def test_an_unknown_metric_is_refused_with_the_measured_ones() -> None:
    given = retrieval(on_a_line(0), [1], on_a_line(1), [1], Euclidean(), ks=(1, 2))
    with pytest.raises(InvalidArgument, match=r"mAP@1.0, cmc@1, cmc@2, not 'cmc@5'"):
        given.mean("cmc@5")


def test_several_versions_rank_as_one_list() -> None:
    """Old items are met by truncated queries, new ones by whole queries; the twin concatenates the two cost tables."""
    generator = np.random.default_rng(3)
    new_q, new_x = vectors(Cosine(), 21, 6, generator), vectors(Cosine(), 10, 6, generator)
    old_q, old_x = Cosine().normalise(new_q[:, :4]), vectors(Cosine(), 15, 4, generator)
    query_labels, item_labels = generator.integers(4, size=21), generator.integers(4, size=25)
    cost = np.hstack([naive.costs(old_q, old_x, Cosine()), naive.costs(new_q, new_x, Cosine())])
    removed = np.r_[np.arange(14, 25), np.full(10, -1)]
    shards = [Compared(old_q, old_x, Cosine()), Compared(new_q, new_x, Cosine())]
    given = mixed_retrieval(shards, query_labels, item_labels, remove_self=removed, block=4)
    assert_equals_naive(given, naive.retrieval(cost, query_labels, item_labels, removed, (1, 5)))


def test_a_shard_may_be_empty() -> None:
    q, x = on_a_line(0, 5), on_a_line(1, 2)
    empty = Compared(q, np.empty((0, 1), np.float32), Euclidean())
    given = mixed_retrieval([empty, Compared(q, x, Euclidean())], [1, 2], [1, 2])
    alone = retrieval(q, [1, 2], x, [1, 2], Euclidean())
    np.testing.assert_array_equal(given.ap, alone.ap)


def test_rankings_from_a_service_measure_the_same() -> None:
    generator = np.random.default_rng(4)
    q, x = vectors(Euclidean(), 30, 5, generator), vectors(Euclidean(), 40, 5, generator)
    query_labels, item_labels = generator.integers(5, size=30), generator.integers(4, size=40)
    order = np.argsort(naive.costs(q, x, Euclidean()), axis=1)
    positives = (query_labels[:, None] == item_labels).sum(axis=1)
    given = retrieval_from_rankings(item_labels[order], query_labels, positives)
    expected = retrieval(q, query_labels, x, item_labels, Euclidean())
    np.testing.assert_allclose(given.ap, expected.ap)
    assert (given.cmc(1), given.cmc(5), given.skipped) == (expected.cmc(1), expected.cmc(5), expected.skipped)


def test_items_that_a_ranking_left_out_count_as_missed() -> None:
    given = retrieval_from_rankings([[7, 3, 7], [3, -1, -1]], [7, 3], [4, 1])
    np.testing.assert_allclose(given.ap, [(1 + 2 / 3) / 4, 1])
    with pytest.raises(InvalidArgument, match="more correct items than exist"):
        retrieval_from_rankings([[7, 7]], [7], [1])


def test_an_interval_holds_the_mean_and_narrows_with_queries() -> None:
    values = np.random.default_rng(0).random(4000)
    wide, narrow = mean_interval(values[:40], 1), mean_interval(values, 1)
    for score, sample in ((wide, values[:40]), (narrow, values)):
        assert score.value == pytest.approx(sample.mean())
        assert score.low < score.value < score.high
        assert score.high - score.low == pytest.approx(2 * 1.96 * sample.std() / len(sample) ** 0.5, rel=0.15)
    assert mean_interval(values, 1) == narrow
    assert mean_interval(values, 2) != narrow


def test_a_wider_level_gives_a_wider_interval() -> None:
    values = np.random.default_rng(0).random(100)
    inner, outer = mean_interval(values, level=0.5), mean_interval(values, level=0.99)
    assert outer.low < inner.low < inner.high < outer.high


def test_resampling_in_pieces_draws_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "BLOCK_SCORES", 70)
    values = np.arange(20.0)
    score = mean_interval(values, 0, n=1000)
    assert score.high - score.low == pytest.approx(2 * 1.96 * values.std() / 20**0.5, rel=0.2)


@pytest.mark.parametrize(("size", "level", "t"), [(5, 0.95, 2.776), (10, 0.999, 4.781), (101, 0.95, 1.984)])
def test_an_interval_by_students_t(size: int, level: float, t: float) -> None:
    """Against printed tables of its quantiles."""
    values = np.random.default_rng(0).random(size)

    found = t_interval(values, level)

    assert found.value == pytest.approx(values.mean())
    reach = t * values.std(ddof=1) / np.sqrt(size)
    assert (found.high - found.value, found.value - found.low) == pytest.approx((reach, reach), rel=1e-3)


def test_an_interval_of_nothing_is_refused() -> None:
    for values in ([], [[1.0, 2.0]]):
        with pytest.raises(InvalidArgument):
            mean_interval(values)


def test_pairing_removes_what_both_sides_share() -> None:
    generator = np.random.default_rng(0)
    old = (generator.random(500) < 0.5).astype(float)
    new = np.where(generator.random(500) < 0.03, 1.0, old)  # never worse
    paired = paired_bootstrap(new, old)
    assert paired.value == pytest.approx(new.mean() - old.mean())
    assert 0 < paired.low < paired.high < 0.05
    with pytest.raises(InvalidArgument, match="one shape"):
        paired_bootstrap(new, old[1:])


def test_gains_of_the_papers_tables() -> None:
    """HBCT, Ext-class, ResNet-18: P_com 0.495; BCT in BT2's run is not compatible, so it has no update gain."""
    assert p_com(0.425, 0.572, 0.722) == pytest.approx(0.495, abs=5e-4)
    assert update_gain(0.425, 0.572, 0.722) == p_com(0.425, 0.572, 0.722)
    assert update_gain(0.336, 0.235, 0.627) is None
    assert p_com(0.336, 0.235, 0.627) == pytest.approx(-0.101 / 0.291)
    assert p_up(0.64, 0.8) == pytest.approx(-0.2)
    assert np.isnan(p_com(0.5, 0.6, 0.5))
    assert np.isnan(p_com(0.5, 0.3, 0.4))  # a loss over a loss is no gain
    assert np.isnan(p_up(0.5, 0.0))


def test_a_tie_is_not_compatible() -> None:
    assert update_gain(0.5, 0.5, 0.6) is None


def test_negative_flips_count_right_then_wrong() -> None:
    assert negative_flips([1, 1, 0, 0, 1], [1, 0, 1, 0, 0]) == 2


def test_cka_is_one_for_the_same_geometry_and_small_for_unrelated_ones() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(500, 6))
    rotation, _ = np.linalg.qr(generator.normal(size=(6, 6)))
    assert linear_cka(x, 3 * x @ rotation + 7) == pytest.approx(1)
    assert linear_cka(x, generator.normal(size=(500, 4))) < 0.05
    assert np.isnan(linear_cka(x, np.ones((500, 2))))


def test_cka_equals_its_definition_by_gram_matrices() -> None:
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(30, 5)), generator.normal(size=(30, 3)) ** 2
    centre = np.eye(30) - 1 / 30
    k, m = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre
    expected = np.trace(k @ m) / np.sqrt(np.trace(k @ k) * np.trace(m @ m))
    assert linear_cka(x, y) == pytest.approx(expected)


def test_a_chain_fills_the_lower_half_of_the_matrix() -> None:
    known = {("v1", "v1"): 0.5, ("v2", "v1"): 0.6, ("v2", "v2"): 0.8, ("v3", "v2"): 0.85, ("v3", "v3"): 0.9}
    known |= {("v4", "v1"): 0.5, ("v4", "v2"): 0.7, ("v4", "v3"): 0.95, ("v4", "v4"): 0.9, ("v1", "v2"): 0.9}
    matrix = compatibility_matrix(["v1", "v2", "v3", "v4"], lambda new, old: known.get((new, old)))
    nan = np.nan
    rows = [[0.5, nan, nan, nan], [0.6, 0.8, nan, nan], [nan, 0.85, 0.9, nan], [0.5, 0.7, 0.95, 0.9]]
    np.testing.assert_array_equal(matrix.values, rows)
    # v2/v1, v3/v2 and v4/v3 hold, v4/v1 is no better, v4/v2 falls below, v3/v1 is unknown.
    assert matrix.average_compatibility == pytest.approx(1 / 2)


def test_memory_depends_on_the_block_and_not_on_the_number_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranked at once, 300 x 100,000 pairs would take 240 MB for the sort keys alone."""
    generator = np.random.default_rng(0)
    x, labels = vectors(Cosine(), 100_000, 8, generator), generator.integers(5000, size=100_000)
    monkeypatch.setattr(evaluation, "BLOCK_SCORES", 1_000_000)
    tracemalloc.start()
    given = retrieval(x[:300], labels[:300], x, labels, Cosine())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert given.cmc(1) > 0.5  # the query itself is among the items
    assert peak < 60e6


@pytest.mark.slow
def test_ten_thousand_queries_over_ten_thousand_items_take_seconds() -> None:
    """The papers' CIFAR-100 protocol, 128 dimensions; processor time, so that a busy machine does not fail it."""
    generator = np.random.default_rng(0)
    q, x = (vectors(Cosine(), 10_000, 128, generator) for _ in range(2))
    query_labels, item_labels = (generator.integers(100, size=10_000) for _ in range(2))
    start = time.process_time()
    retrieval(q, query_labels, x, item_labels, Cosine())
    assert time.process_time() - start < 20  # two cores for ten seconds


@pytest.mark.parametrize("curvature", [0.3, 1.0])
@pytest.mark.parametrize("length", [1.0, 1e3, 1e6])
def test_far_from_the_origin_costs_are_the_distances_that_a_shard_answers(length: float, curvature: float) -> None:
    """Checked also by 80 decimal digits; half of the items are near a query."""
    generator, space = np.random.default_rng(0), Lorentz(curvature)
    q = (length * generator.normal(size=(6, 4))).astype(np.float32)
    x = np.concatenate([q + generator.normal(size=q.shape), length * generator.normal(size=q.shape), q])
    x = x.astype(np.float32)
    shard = FlatShard(4, space)
    shard.upsert(np.arange(len(x)), x)
    answered, keys, *_ = shard.search(q, len(x))

    given = scores_of(costs(*comparable(Compared(q, x, space)), space), space)

    np.testing.assert_allclose(np.take_along_axis(given, keys, axis=1), answered, rtol=3e-7, atol=1e-12)
    exact = [[_exact_distance(a, b, curvature) for b in x] for a in q]
    np.testing.assert_allclose(given, exact, rtol=3e-7, atol=1e-12)


def _exact_distance(a: np.ndarray, b: np.ndarray, curvature: float) -> float:
    with localcontext(prec=80):
        q, x, k = [Decimal(float(v)) for v in a], [Decimal(float(v)) for v in b], Decimal(curvature)
        times = [(1 / k + sum(v * v for v in point)).sqrt() for point in (q, x)]
        chord = 2 * k * (times[0] * times[1] - sum(v * w for v, w in zip(q, x, strict=True))) - 2
        return 2 * math.asinh(float(max(chord, Decimal(0)).sqrt()) / 2) / curvature**0.5
