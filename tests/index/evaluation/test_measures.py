"""index.evaluation.measures: TAR@FAR and recall per query, against naive loops in float64."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

import naive
from index.errors import InvalidArgument
from index.evaluation import metrics
from index.evaluation.measures import PerQuery, first_items, recall, recall_of, tar
from index.evaluation.metrics import Compared
from index.space import space_from_json
from naive import unit

COSINE, L2 = space_from_json({"kind": "cosine"}), space_from_json({"kind": "l2"})


def drawn(seed: int, size: int = 40, dim: int = 6, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    labels = draw.integers(classes, size=size)
    x = draw.normal(size=(classes, dim))[labels] + draw.normal(scale=0.8, size=(size, dim))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), labels


def naive_tar(queries: np.ndarray, items: np.ndarray, labels: np.ndarray, far: float) -> list[float]:
    """Of each query: all of its pairs but the one with itself, at the threshold that all pairs give."""
    scores = naive.scores(queries, items, COSINE).astype(np.float32)
    same, other = labels[:, None] == labels, ~np.eye(len(labels), dtype=bool)
    limit = naive.threshold(scores[same & other], scores[~same], far)
    return [float(np.mean(scores[i][same[i] & other[i]] >= limit)) for i in range(len(labels))]


@pytest.mark.parametrize("far", [0.001, 0.05, 0.3])
def test_tar_against_the_naive_version(far: float) -> None:
    (old, labels), (new, _) = drawn(0), drawn(1)

    for queries, items in ((old, old), (new, old)):
        measured = tar(Compared(queries, items, COSINE), labels, labels, far, np.arange(40))
        expected = naive_tar(queries, items, labels, far)
        np.testing.assert_allclose(measured.per_query(f"TAR@FAR={far:g}"), expected)
        scores = queries.astype(np.float64) @ items.T.astype(np.float64)
        np.fill_diagonal(scores, -np.inf)
        first = labels[scores.argmax(axis=1)] == labels
        np.testing.assert_array_equal(measured.per_query("cmc@1"), first)
        assert measured.valid.all()


def test_tar_by_hand() -> None:
    """Points on a line: a at 0 and 1, b at 10 and 13. Other pairs are 9 to 13 apart, so all own ones pass at FAR 0."""
    x = np.array([[0.0], [1], [10], [13]], np.float32)
    labels = np.array(["a", "a", "b", "b"])

    strict = tar(Compared(x, x, L2), labels, labels, 1e-6, np.arange(4))

    assert strict.per_query("TAR@FAR=1e-06").tolist() == [1, 1, 1, 1]
    near = np.array([[0.0], [4], [5], [13]], np.float32)
    mixed = tar(Compared(near, near, L2), labels, labels, 1e-6, np.arange(4))
    # b's closest pair (5, 13) is 8 apart, while 4 and 5 are of different labels and 1 apart.
    assert mixed.per_query("TAR@FAR=1e-06").tolist() == [0, 0, 0, 0]
    assert mixed.per_query("cmc@1").tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("far", [0.003, 0.05])
def test_resampled_tar_spreads_as_tar_with_a_threshold_of_each_resample(far: float) -> None:
    generator = np.random.default_rng(9)
    labels = np.arange(150) % 10
    x = unit(generator.normal(size=(10, 16))[labels] + generator.normal(size=(150, 16)))
    shard, own, name = Compared(x, x, COSINE), np.arange(150), f"TAR@FAR={far:g}"
    measured = tar(shard, labels, labels, far, own)
    draws = generator.integers(150, size=(100, 150))

    found = measured.resampled(name)[draws].mean(axis=1)

    anew = [tar(replace(shard, queries=x[d]), labels[d], labels, far, d).per_query(name).mean() for d in draws]
    assert np.corrcoef(found, anew)[0, 1] > 0.9
    assert np.std(found) == pytest.approx(np.std(anew), rel=0.15)
    assert measured.resampled(name).mean() == pytest.approx(measured.per_query(name).mean())
    np.testing.assert_array_equal(measured.resampled("cmc@1"), measured.per_query("cmc@1"))


def test_a_label_of_its_own_is_not_valid_and_one_sided_labels_are_refused() -> None:
    x, _ = drawn(2, size=5)
    measured = tar(Compared(x, x, COSINE), [0, 0, 1, 1, 2], [0, 0, 1, 1, 2], 0.1, np.arange(5))

    assert measured.valid.tolist() == [True, True, True, True, False]
    for labels in ([0] * 5, [0, 1, 2, 3, 4]):
        with pytest.raises(InvalidArgument, match="one label and pairs of different"):
            tar(Compared(x, x, COSINE), labels, labels, 0.1, np.arange(5))
    with pytest.raises(InvalidArgument, match="one label and pairs of different"):
        tar(Compared(x[:0], x[:0], COSINE), [], [], 0.1, np.arange(0))


@pytest.mark.parametrize("k", [1, 3, 10])
def test_recall_against_the_naive_version(k: int) -> None:
    (old, _), (new, _) = drawn(3), drawn(4)

    def first(queries: np.ndarray, items: np.ndarray) -> list[list[int]]:
        ranked = [[j for j in np.argsort(-(items.astype(np.float64) @ q), kind="stable") if j != i]
                  for i, q in enumerate(queries.astype(np.float64))]  # fmt: skip
        return [row[:k] for row in ranked]

    found, truth = (first_items(Compared(q, old, COSINE), k, np.arange(40)) for q in (old, new))
    assert found.tolist() == first(old, old)
    measured = recall(found, truth)
    expected = [len(set(a) & set(b)) / k for a, b in zip(first(old, old), first(new, old), strict=True)]
    np.testing.assert_allclose(measured.per_query(f"recall@{k}"), expected)
    right = [a[0] in b for a, b in zip(first(old, old), first(new, old), strict=True)]
    np.testing.assert_array_equal(measured.per_query("cmc@1"), right)


def test_recall_of_listed_items_is_the_share_of_each_querys_own() -> None:
    found = np.array([[3, 0, 7], [0, 1, 2], [5, 4, 2], [1, 2, 3]])
    right = np.array([[0, 9, -1], [0, -1, -1], [0, 1, 2], [-1, -1, -1]])

    measured = recall_of(found, right, 2)

    assert measured.per_query("recall@2").tolist() == [0.5, 1, 0, 0]
    assert measured.per_query("cmc@1").tolist() == [0, 1, 0, 0]
    assert measured.valid.tolist() == [True, True, True, False]


def test_recall_of_long_lists_takes_memory_for_the_lists_alone() -> None:
    lists = np.random.default_rng(8).permuted(np.tile(np.arange(2000), (200, 1)), axis=1)
    found, truth = lists[:, :1000], lists[:, 500:1500]

    tracemalloc.start()
    measured = recall(found, truth)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert measured.per_query("recall@1000").tolist() == [0.5] * 200
    assert peak < 2 * lists.nbytes


def test_equal_items_come_in_the_order_of_their_numbers() -> None:
    """On a line, so that costs are whole numbers, some of them 0."""
    x = np.random.default_rng(7).integers(-3, 4, size=(600, 1)).astype(np.float32)
    far = np.where(np.eye(600, dtype=bool), np.inf, np.abs(x - x.T))

    for k in (1, 10, 599):
        found = first_items(Compared(x, x, L2), k, np.arange(600))
        np.testing.assert_array_equal(found, np.argsort(far, axis=1, kind="stable")[:, :k])
    others = first_items(Compared(x, x, L2), 600, np.full(600, -1))
    np.testing.assert_array_equal(others, np.argsort(np.abs(x - x.T), axis=1, kind="stable"))


@pytest.mark.parametrize("far", [0.001, 0.3, 0.999])
def test_tar_is_the_same_whatever_is_compared_at_once(far: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = drawn(6)
    expected = naive_tar(x, x, labels, far)

    monkeypatch.setattr(metrics, "BLOCK_SCORES", 3 * len(x))

    measured = tar(Compared(x, x, COSINE), labels, labels, far, np.arange(40))
    np.testing.assert_allclose(measured.per_query(f"TAR@FAR={far:g}"), expected)


def test_bad_k_and_unknown_metrics_are_refused() -> None:
    x, _ = drawn(5, size=4)

    for k in (0, 4):
        for own in ([0, 1, 2, 3], [-1, 1, -1, -1]):
            with pytest.raises(InvalidArgument, match="k must be 1 to 3"):
                first_items(Compared(x, x, COSINE), k, own)
    with pytest.raises(InvalidArgument, match="one of a, not 'b'"):
        PerQuery({"a": np.zeros(1)}, np.ones(1, bool)).per_query("b")
