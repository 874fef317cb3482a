"""index.engines.memory.segments: a shard that seals, merges and indexes itself answers as a dictionary would."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.engines.base import MISSING
from index.engines.config import IndexConfig, IndexKind, Storage
from index.engines.memory import segments
from index.engines.memory.flat import FlatShard
from index.engines.memory.segments import SegmentedShard
from index.space import Cosine, Euclidean, Lorentz, Space
from staging.states.small_shards import DIM, make_shards_small, vectors, work

SPACES = [Cosine(), Euclidean(), Lorentz(0.5)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_shards_small(monkeypatch)


class Twins:
    """A segmented shard and a flat one that are given the same."""

    def __init__(self, space: Space, kind: IndexKind) -> None:
        self.space, self.writes = space, 0
        self.shard = SegmentedShard(DIM, space, IndexConfig(kind=kind))
        self.flat = FlatShard(DIM, space)

    def put(self, keys: list[int]) -> None:
        """Each of them one of its two vectors: the one that it does not have, as a rule."""
        self.writes += 1
        given = vectors(self.space, 121, seed=self.writes % 2)[keys]
        for one in (self.shard, self.flat):
            one.upsert(keys, given, 2 * np.array(keys, np.int64))

    def delete(self, keys: list[int]) -> None:
        for one in (self.shard, self.flat):
            one.delete(keys)

    def work(self, keys: list[int]) -> None:
        """Half of these are deleted, and half replaced, while indexes are built."""

        def beside() -> None:
            self.delete(keys[::2])
            self.put(keys[1::2])

        work(self.shard, beside)

    def stored(self) -> list[int]:
        return sorted(self.flat.rows()[1].tolist())


keys = st.lists(st.integers(0, 120), max_size=60, unique=True)
KINDS = [kind for kind in IndexKind if not kind.is_remote]
operations = st.lists(st.tuples(st.sampled_from([Twins.put, Twins.delete, Twins.work]), keys), max_size=12)


@settings(deadline=None)
@given(
    steps=operations,
    space=st.sampled_from(SPACES),
    kind=st.sampled_from(KINDS),
)
def test_any_writes_sealing_and_merging_leave_what_a_flat_shard_holds(
    steps: list[tuple[Callable[[Twins, list[int]], None], list[int]]], space: Space, kind: IndexKind
) -> None:
    twins = Twins(space, kind)
    for step, keys in steps:
        step(twins, keys)
        assert twins.shard.count() == twins.flat.count()

    stored, queries = twins.stored(), vectors(space, 5, seed=7)
    assert np.array_equal(twins.shard.fetch(stored), twins.flat.fetch(stored))
    for k, allowed in ((1, None), (10, np.random.default_rng(0).random(300) < 0.5), (200, None)):
        right, right_slots, *_ = twins.flat.search(queries, k, allowed)
        np.testing.assert_allclose(twins.shard.search(queries, k, allowed, exact=True)[0], right, rtol=1e-4, atol=1e-4)
        found = twins.shard.search(queries, k, allowed)[1]
        legal = {2 * key for key in stored if allowed is None or allowed[2 * key]}
        assert set(found.ravel().tolist()) - {MISSING} <= legal
        assert np.count_nonzero(found != MISSING) == np.count_nonzero(right_slots != MISSING)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", list(Storage))
def test_scores_are_those_of_brute_force_bit_for_bit(kind: IndexKind, storage: Storage) -> None:
    """Of whole numbers, whose squares no order of adding them up rounds."""
    random = np.random.default_rng(0)
    x, queries = (random.integers(-9, 10, (n, DIM)).astype(np.float32) for n in (200, 20))
    shard = SegmentedShard(DIM, Euclidean(), IndexConfig(kind=kind, storage=storage, recall=0.9))
    shard.upsert(range(180), x[:180])
    work(shard)
    shard.upsert(range(180, 200), x[180:])
    right = np.sqrt(np.square(queries[:, None] - x).sum(axis=2))

    exact, found = shard.search(queries, 10, exact=True), shard.search(queries, 10)

    assert np.array_equal(exact.scores_QK, np.sort(right, axis=1)[:, :10])
    for hits in (exact, found):
        assert np.array_equal(hits.scores_QK, np.take_along_axis(right, hits.slots_QK, axis=1))


@pytest.mark.parametrize("asked", [100, 300])
def test_of_what_was_asked_only_the_last_queries_are_kept(asked: int) -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig())
    shard.upsert(range(100), vectors(Cosine(), 100))
    work(shard)
    requests = [vectors(Cosine(), asked, seed=seed) for seed in range(4)]
    for queries in requests:
        shard.search(queries, 10)
    shard.upsert(range(100, 200), vectors(Cosine(), 100, seed=1))
    job, last = shard.freeze(), np.concatenate(requests)[-segments.RECENT_QUERIES :]
    gone = [weakref.ref(queries) for queries in requests]
    del requests, queries

    assert job is not None
    assert np.array_equal(np.stack(job.recent_queries), last)
    assert {one() for one in gone} == {None}


def test_the_same_vectors_again_only_move_their_slots() -> None:
    shard, x = SegmentedShard(DIM, Cosine(), IndexConfig()), vectors(Cosine(), 100)
    shard.upsert(range(100), x)
    work(shard)
    shard.upsert([3, 4], np.stack([x[3], x[5]]), np.array([200, 201]))
    allowed = np.zeros(300, np.bool_)
    allowed[[200, 201]] = True

    assert shard.head.count() == 1
    assert sorted(shard.search(x[:1], 5, allowed)[1][0].tolist()) == [MISSING] * 3 + [200, 201]


def test_an_item_that_gets_its_deleted_vector_back_while_its_segment_is_replaced_is_held() -> None:
    shard, given = SegmentedShard(DIM, Cosine(), IndexConfig()), vectors(Cosine(), 80)
    shard.upsert(range(80), given)
    work(shard)
    shard.delete(range(40))

    work(shard, beside=lambda: shard.upsert([7], given[7:8], np.array([90])))

    assert (shard.row_count(), shard.count()) == (41, 41)
    assert shard.search(given[7:8], 1).slots_QK.tolist() == [[90]]
    np.testing.assert_array_equal(shard.fetch([7]), given[7:8])


def test_an_item_that_gets_an_earlier_vector_back_while_both_its_segments_are_merged_is_found_by_it() -> None:
    shard, earlier = SegmentedShard(DIM, Cosine(), IndexConfig()), vectors(Cosine(), 80)
    shard.upsert(range(80), earlier)
    work(shard)
    shard.upsert(range(40), vectors(Cosine(), 40, seed=1))
    jobs = []

    def beside() -> None:
        jobs.append("the second one merges")
        if len(jobs) == 2:
            shard.upsert([7], earlier[7:8])

    work(shard, beside)

    assert len(jobs) >= 2
    assert (shard.row_count(), shard.count()) == (80, 80)
    np.testing.assert_array_equal(shard.fetch([7]), earlier[7:8])


def test_another_configuration_is_taken_up_while_it_serves() -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    shard.upsert(range(100), vectors(Cosine(), 100))
    work(shard)
    shard.config = IndexConfig(kind=IndexKind.IVF)
    work(shard)

    (sealed,) = shard.segments
    assert sealed.tuned is not None
    assert sealed.tuned.index.kind is IndexKind.IVF


def test_queries_that_are_compared_one_by_one_after_all_are_told() -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    stored = vectors(Cosine(), 4000, centres=40)
    shard.upsert(range(4000), stored)
    work(shard)
    query = vectors(Cosine(), 1, seed=3, centres=40)
    near = (stored @ query.T)[:, 0]

    assert shard.search(query, 10, near < np.quantile(near, 0.5)).scanned.exact == 2000
    assert shard.search(query, 10, near >= np.quantile(near, 0.5)).scanned.exact == 0
