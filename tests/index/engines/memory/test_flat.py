"""index.engines.memory.flat: FlatShard does what a dictionary of vectors would do, under any operations."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive
from index.engines.base import MISSING
from index.engines.memory.flat import FlatShard
from index.space import Cosine, Euclidean, Lorentz, Space

DIM = 3
SPACES = [Cosine(), Euclidean(), Lorentz(0.5)]


def vector(seed: int, space: Space) -> np.ndarray:
    return space.normalise(np.random.default_rng(seed).normal(size=(1, DIM)).astype(np.float32))


def vectors(seeds: list[int], space: Space) -> np.ndarray:
    return np.concatenate([vector(seed, space) for seed in seeds]) if seeds else np.empty((0, DIM), np.float32)


def assert_same(shard: FlatShard, model: dict[int, int], space: Space, k: int) -> None:
    """The shard ranks what the model holds; keys may swap where scores tie."""
    assert shard.count() == len(model)
    queries = vectors([1001, 1002], space)
    scores, keys, *_ = shard.search(queries, k)
    assert scores.shape == keys.shape == (2, k)
    found = min(k, len(model))
    assert (keys[:, found:] == MISSING).all()
    order = sorted(model)
    table = naive.scores(queries, vectors([model[key] for key in order], space), space)
    for row in range(2):
        best = np.sort(-table[row] if space.higher_is_better else table[row])[:found]
        np.testing.assert_allclose(
            scores[row, :found], -best if space.higher_is_better else best, atol=2e-3, err_msg="scores"
        )
        at = [order.index(int(key)) for key in keys[row, :found]]
        np.testing.assert_allclose(table[row][at], scores[row, :found], atol=2e-3, err_msg="keys")
        assert len(set(at)) == found


keys_strategy = st.lists(st.integers(0, 12), max_size=6, unique=True)
operations = st.lists(
    st.tuples(st.just("upsert"), keys_strategy, st.integers(0, 10**6))
    | st.tuples(st.just("delete"), keys_strategy, st.just(0)),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(operations=operations, space=st.sampled_from(SPACES), k=st.integers(1, 15))
def test_a_shard_equals_a_dictionary_after_any_operations(
    operations: list[tuple[str, list[int], int]], space: Space, k: int
) -> None:
    shard = FlatShard(DIM, space)
    model: dict[int, int] = {}
    for name, keys, seed in operations:
        if name == "upsert":
            seeds = [seed + i for i in range(len(keys))]
            shard.upsert(keys, vectors(seeds, space))
            model.update(zip(keys, seeds, strict=True))
        else:
            shard.delete(keys)
            for key in keys:
                model.pop(key, None)
    assert_same(shard, model, space, k)
    held = sorted(model)
    np.testing.assert_array_equal(shard.fetch(held), space.items(vectors([model[key] for key in held], space)))


ROWS = 20_000


@pytest.fixture(scope="module", params=SPACES, ids=lambda space: space.kind)
def large(request: pytest.FixtureRequest) -> tuple[FlatShard, np.ndarray, np.ndarray]:
    """A shard of ROWS items with keys from 0 on, its vectors and 24 queries; FAISS takes another path from 20 on."""
    space: Space = request.param
    generator = np.random.default_rng(3)
    x = space.normalise(generator.normal(size=(ROWS, 8)).astype(np.float32))
    shard = FlatShard(8, space)
    shard.upsert(range(ROWS), x)
    return shard, x, space.normalise(generator.normal(size=(24, 8)).astype(np.float32))


@pytest.mark.parametrize("many", [0, 1, 2, 20, 200, 1900, 2100, 10_000, 19_999, 20_000])
@pytest.mark.parametrize("queries", [1, 5, 24])
def test_a_restricted_search_is_exact_at_every_selectivity(
    large: tuple[FlatShard, np.ndarray, np.ndarray], many: int, queries: int
) -> None:
    shard, x, all_queries = large
    q, k = all_queries[:queries], 7
    allowed = np.zeros(ROWS, np.bool_)
    allowed[np.random.default_rng(many).permutation(ROWS)[:many]] = True
    scores, keys, *_ = shard.search(q, k, allowed)
    assert scores.shape == keys.shape == (queries, k)
    found = min(k, many)
    assert (keys[:, found:] == MISSING).all()
    assert allowed[keys[:, :found]].all()
    assert all(len(set(row)) == found for row in keys[:, :found].tolist())
    table = naive.scores(q, x[allowed], shard.space)
    best = np.sort(-table if shard.space.higher_is_better else table, axis=1)[:, :found]
    np.testing.assert_allclose(
        scores[:, :found], -best if shard.space.higher_is_better else best, atol=2e-3, err_msg="scores"
    )
    for row in range(queries):
        exact = naive.scores(q[row : row + 1], x[keys[row, :found]], shard.space)[0] if found else np.empty(0)
        np.testing.assert_allclose(exact, scores[row, :found], atol=2e-3, err_msg="keys")


@pytest.mark.parametrize("queries", [1, 24])
@pytest.mark.parametrize("many", [3000, 15_000])
def test_a_restricted_search_can_return_everything_that_is_allowed(
    large: tuple[FlatShard, np.ndarray, np.ndarray], many: int, queries: int
) -> None:
    shard, _, all_queries = large
    allowed = np.arange(ROWS) < many
    scores, keys, *_ = shard.search(all_queries[:queries], ROWS, allowed)
    np.testing.assert_array_equal(np.sort(keys[:, :many], axis=1), np.tile(np.arange(many), (queries, 1)))
    assert (keys[:, many:] == MISSING).all()
    order = np.diff(scores[:, :many], axis=1)
    assert (order <= 1e-6).all() if shard.space.higher_is_better else (order >= -1e-6).all()


def test_restriction_looks_at_slots_and_follows_rows_that_move() -> None:
    shard = FlatShard(2, Euclidean())
    shard.upsert([10, 11, 12], np.array([[0, 0], [1, 0], [2, 0]], np.float32), np.array([2, 0, 1]))
    only = np.eye(3, dtype=np.bool_)

    def nearest() -> list[tuple[float, int]]:
        """Distance and slot of what each slot alone gives."""
        hits = [shard.search(np.array([[0, 0]], np.float32), 1, only[slot]) for slot in range(3)]
        return [(hit.scores_QK[0, 0], hit.slots_QK[0, 0]) for hit in hits]

    assert nearest() == [(1, 0), (2, 1), (0, 2)]
    shard.delete([10])  # the last row moves to its place
    assert nearest() == [(1, 0), (2, 1), (0, MISSING)]
    shard.upsert([11], np.array([[1, 0]], np.float32), np.array([2]))
    assert nearest() == [(0, MISSING), (2, 1), (1, 2)]


def test_a_shard_grows_past_its_first_reservation() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(5000, DIM)).astype(np.float32)
    shard = FlatShard(DIM, Euclidean())
    for start in range(0, 5000, 700):
        shard.upsert(range(start, min(start + 700, 5000)), x[start : start + 700])
    assert shard.count() == 5000
    _, keys, *_ = shard.search(x[[0, 1023, 1024, 4999]], 1)
    np.testing.assert_array_equal(keys[:, 0], [0, 1023, 1024, 4999])


def test_replacing_leaves_nothing_of_the_old_vector() -> None:
    shard = FlatShard(2, Euclidean())
    shard.upsert([7], np.array([[0, 0]], np.float32))
    shard.upsert([7], np.array([[5, 0]], np.float32))
    scores, keys, *_ = shard.search(np.array([[0, 0]], np.float32), 2)
    np.testing.assert_array_equal(keys, [[7, MISSING]])
    assert scores[0, 0] == pytest.approx(5)


def test_large_keys_are_kept() -> None:
    shard = FlatShard(2, Cosine())
    shard.upsert([2**62], np.array([[1, 0]], np.float32))
    assert shard.search(np.array([[1, 0]], np.float32), 1)[1][0, 0] == 2**62


def test_an_empty_shard_and_no_queries_give_padding_and_nothing() -> None:
    shard = FlatShard(DIM, Cosine())
    scores, keys, *_ = shard.search(vectors([1], Cosine()), 3)
    assert scores.shape == (1, 3)
    assert (keys == MISSING).all()
    shard.upsert([1], vectors([1], Cosine()))
    assert shard.search(np.empty((0, DIM), np.float32), 3)[1].shape == (0, 3)


def test_fetching_an_unknown_key_is_an_error() -> None:
    with pytest.raises(KeyError):
        FlatShard(DIM, Cosine()).fetch([1])


def test_a_shard_fetches_a_copy() -> None:
    shard = FlatShard(DIM, Cosine())
    shard.upsert([1], vectors([1], Cosine()))
    held: Any = shard.fetch([1])
    held[:] = 0
    np.testing.assert_array_equal(shard.fetch([1]), vectors([1], Cosine()))


def test_a_shard_of_one_item_is_small_and_grows_by_factors() -> None:
    shard, x = FlatShard(1024, Cosine()), np.eye(1, 1024, dtype=np.float32)
    tracemalloc.start()
    shard.upsert([0], x)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 10 * x.nbytes
    grown = set()
    for key in range(1, 300):
        shard.upsert([key], x)
        grown.add(id(shard._rows_RW))
    assert len(grown) < 20


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
@pytest.mark.parametrize("queries", [1, 2, 40])
def test_a_longer_list_begins_as_a_shorter_one_whatever_is_equally_near(
    space: Space, share: float, queries: int
) -> None:
    generator = np.random.default_rng(5)
    shard = FlatShard(DIM, space)
    shard.upsert(range(600), vectors(generator.integers(0, 9, 600).tolist(), space))
    allowed = generator.random(600) < share
    asked = vectors(list(range(queries)), space)

    scores, slots, *_ = shard.search(asked, int(allowed.sum()), allowed)

    assert (scores[:, 1:] == scores[:, :-1]).mean() > 0.7
    for row in slots.tolist():
        assert sorted(row) == np.flatnonzero(allowed).tolist()
    for k in (1, 7, 10, 20, 55):
        shorter, begin, *_ = shard.search(asked, k, allowed)
        assert begin.tolist() == slots[:, :k].tolist()
        np.testing.assert_allclose(shorter, scores[:, :k], atol=1e-6)


@pytest.mark.parametrize("space", [Cosine(), Euclidean()], ids=lambda space: space.kind)
@pytest.mark.parametrize("dim", [2, 4, 8, 12, 13])
@pytest.mark.parametrize("filtered", [False, True])
def test_short_vectors_are_equally_near_wherever_they_lie(space: Space, dim: int, filtered: bool) -> None:
    """FAISS has kernels for a few widths, which round otherwise than its scan, and the last rows in another way."""
    x = space.normalise(naive.draw(7, dim, seed=1))
    shard, random = FlatShard(dim, space), np.random.default_rng(2)
    of = random.integers(0, 7, 301)
    shard.upsert(range(301), x[of])
    allowed = random.random(301) < 0.6 if filtered else np.ones(301, np.bool_)

    for query in space.normalise(naive.draw(15, dim, seed=3)):
        scores, slots, *_ = shard.search(query[None], int(allowed.sum()), allowed)
        assert len(np.unique(scores)) == 7
        for k in range(1, 60, 2):
            shorter, begin, *_ = shard.search(query[None], k, allowed)
            assert (begin.tolist(), shorter.tolist()) == (slots[:, :k].tolist(), scores[:, :k].tolist())


@pytest.mark.parametrize("filtered", [False, True])
def test_long_vectors_near_each_other_are_told_apart_among_many_queries_as_alone(filtered: bool) -> None:
    generator = np.random.default_rng(3)
    x = (30 + 0.01 * generator.standard_normal((300, 512))).astype(np.float32)
    q = x + (0.001 * generator.standard_normal(x.shape)).astype(np.float32)
    allowed = generator.random(len(x)) < 0.3 if filtered else np.ones(len(x), np.bool_)
    shard = FlatShard(512, Euclidean())
    shard.upsert(range(len(x)), x)

    many = shard.search(q, 10, allowed)

    a, b = (v.astype(np.float64) for v in (q[:20], x[allowed]))
    distances = np.sqrt(np.square(a[:, None] - b).sum(axis=2))
    best = np.argsort(distances, axis=1)[:, :10]
    assert np.array_equal(many.slots_QK[:20], np.flatnonzero(allowed)[best])
    np.testing.assert_allclose(many.scores_QK[:20], np.take_along_axis(distances, best, axis=1), rtol=1e-5)
    for number in range(20):
        assert np.array_equal(shard.search(q[number : number + 1], 10, allowed).scores_QK[0], many.scores_QK[number])


@pytest.mark.parametrize("norm", [1.0, 1_000.0, 30_000.0])
@pytest.mark.parametrize("filtered", [False, True])
def test_lorentz_far_from_the_origin_ranks_as_float64_does(norm: float, filtered: bool) -> None:
    generator = np.random.default_rng(3)
    centres = generator.standard_normal((4, 32))
    centres *= norm / np.linalg.norm(centres, axis=1, keepdims=True)
    # Neighbours within a few units of hyperbolic distance, where float32 products tell nothing apart.
    x = (np.repeat(centres, 200, axis=0) + generator.standard_normal((800, 32))).astype(np.float32)
    q = (centres + generator.standard_normal((4, 32))).astype(np.float32)
    shard = FlatShard(32, Lorentz(0.5))
    shard.upsert(np.arange(len(x)), x)
    allowed = generator.random(len(x)) < 0.3 if filtered else np.ones(len(x), np.bool_)

    scores, keys, *_ = shard.search(q, 10, allowed if filtered else None)

    a, b = (v.astype(np.longdouble) for v in (q, x))
    times = [np.sqrt(2 + (v**2).sum(axis=1)) for v in (a, b)]
    product = np.multiply.outer(*times) - a @ b.T
    expected = np.where(allowed, np.arccosh(np.maximum(product / 2, 1)) * np.sqrt(np.longdouble(2)), np.inf)
    order = np.argsort(expected, axis=1)[:, :10]
    np.testing.assert_array_equal(keys, order)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, order, axis=1).astype(float), rtol=2e-6)
