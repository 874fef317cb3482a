"""index.engines.segments: a shard that seals, merges and indexes itself answers as a dictionary of vectors would."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.engines import approximate, segment, segments
from index.engines.base import MISSING, Scanned
from index.engines.config import IndexConfig, IndexKind, Storage
from index.engines.flat import FlatShard
from index.engines.segments import SegmentedShard
from index.events import Event
from index.space import Cosine, Euclidean, Lorentz, Space
from staging.small_shards import DIM, make_shards_small, vectors, work

SPACES = [Cosine(), Euclidean(), Lorentz(0.5)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_shards_small(monkeypatch)


def recall(shard: SegmentedShard, queries: np.ndarray, allowed: np.ndarray | None = None, k: int = 10) -> float:
    found, right = shard.search(queries, k, allowed)[1], shard.search(queries, k, allowed, exact=True)[1]
    return float(
        np.mean([len(set(a) & set(b)) / len(set(b)) for a, b in zip(found.tolist(), right.tolist(), strict=True)])
    )


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
KINDS = [kind for kind in IndexKind if not kind.elsewhere]
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


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
@pytest.mark.parametrize("kind", [IndexKind.HNSW, IndexKind.IVF])
@pytest.mark.parametrize("storage", list(Storage))
def test_an_index_reaches_its_recall_at_every_share_of_items_that_may_be_found(
    space: Space, kind: IndexKind, storage: Storage
) -> None:
    shard = SegmentedShard(DIM, space, IndexConfig(kind=kind, storage=storage, recall=0.95))
    shard.upsert(range(4000), vectors(space, 4000, centres=200))
    work(shard)
    (sealed,) = shard.segments
    assert sealed.tuned is not None
    assert sealed.tuned.recall >= 0.95
    queries = vectors(space, 200, seed=3, centres=200)

    assert shard.search(queries, 10).how.approximate == 4000
    assert recall(shard, queries) >= 0.95
    for share in (0.5, 0.1, 0.01, 0.001):
        allowed = np.random.default_rng(1).random(4000) < share
        assert recall(shard, queries, allowed) >= 0.92
    shard.delete(range(0, 4000, 2))
    assert recall(shard, queries) >= 0.92
    assert (shard.search(queries, 100)[1] % 2 == 1).all()


@pytest.mark.parametrize(
    ("node_cost", "few", "built", "taken"),
    [
        (20, 8, [IndexKind.IVF], IndexKind.IVF),
        (20, 0, [IndexKind.IVF, IndexKind.HNSW], IndexKind.IVF),
        (1, 0, [IndexKind.IVF, IndexKind.HNSW], IndexKind.HNSW),
    ],
    ids=["few lists are enough", "lists take less", "a graph takes less"],
)
def test_auto_takes_what_reaches_the_aim_for_less(
    monkeypatch: pytest.MonkeyPatch, node_cost: int, few: int, built: list[IndexKind], taken: IndexKind
) -> None:
    monkeypatch.setattr(approximate, "NODE_COST", node_cost)
    monkeypatch.setattr(segment, "FEW_LISTS", few)
    monkeypatch.setattr(segments, "FILLED_SECONDS", 0.0)
    kinds = []

    def build(kind: IndexKind, *about: Any, **more: Any) -> Any:
        kinds.append(kind)
        return approximate.build(kind, *about, **more)

    monkeypatch.setattr(segment, "build", build)
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.AUTO))
    shard.upsert(range(2000), vectors(Cosine(), 2000, centres=100))
    work(shard)
    (sealed,) = shard.segments

    assert kinds == built
    assert sealed.tuned is not None
    assert sealed.tuned.index.kind is taken
    assert recall(shard, vectors(Cosine(), 200, seed=3, centres=100)) >= 0.99


@pytest.mark.parametrize("kind", [IndexKind.HNSW, IndexKind.IVF])
def test_a_query_may_have_another_recall_aim_than_its_gallery(tmp_path: Path, kind: IndexKind) -> None:
    random = np.random.default_rng(0)
    x, queries = (Cosine().normalise(random.normal(size=(n, DIM)).astype(np.float32)) for n in (2500, 200))
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=kind, recall=0.95), tmp_path)
    shard.upsert(range(2500), x)
    work(shard)
    right, efforts = shard.search(queries, 10, exact=True).slots_QK, []
    for aim in (0.75, 0.8, None, 0.95, 0.99, 0.992, 0.9999):
        hits = shard.search(queries, 10, recall=aim)
        found = np.mean([len({*a} & {*b}) / 10 for a, b in zip(hits.slots_QK.tolist(), right.tolist(), strict=True)])
        assert found >= (aim or 0.95) - 0.01
        efforts.append(hits.how.effort)

    low, lowest, own, same, high, higher, none = efforts
    assert 0 < low == lowest < own == same < high <= higher
    assert none == 0, "an aim that was never reached is for an exact search"
    again = SegmentedShard(DIM, Cosine(), shard.config, tmp_path)
    again.upsert(range(2500), x)
    assert again.search(queries, 10, recall=0.8).how.effort == lowest


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


@pytest.mark.parametrize("kind", [IndexKind.HNSW, IndexKind.IVF])
def test_recall_holds_where_what_may_be_found_lies_away_from_the_query(kind: IndexKind) -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=kind))
    stored = vectors(Cosine(), 4000, centres=40)
    shard.upsert(range(4000), stored)
    work(shard)
    queries = vectors(Cosine(), 60, seed=3, centres=40)
    near = (stored @ queries.T).max(axis=1)  # to the nearest of all queries

    assert recall(shard, queries, near < np.quantile(near, 0.5)) >= 0.98
    assert recall(shard, queries, near > np.quantile(near, 0.5)) >= 0.98


@pytest.mark.parametrize("kind", [IndexKind.HNSW, IndexKind.IVF])
@pytest.mark.parametrize("k", [20, 50, 300, 1500])
def test_recall_holds_for_lists_of_any_length(kind: IndexKind, k: int) -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=kind))
    shard.upsert(range(4000), vectors(Cosine(), 4000, centres=200))
    work(shard)

    assert recall(shard, vectors(Cosine(), 60, seed=3, centres=200), k=k) >= 0.97


def test_few_allowed_items_are_compared_one_by_one_and_many_are_not() -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig())
    shard.upsert(range(4000), vectors(Cosine(), 4000))
    work(shard)
    queries, allowed = vectors(Cosine(), 2, seed=3), np.zeros(4000, np.bool_)
    allowed[:20] = True

    assert shard.search(queries, 10, allowed).how.exact == 20
    assert shard.search(queries, 10, ~allowed).how.approximate == 3980
    assert shard.search(queries, 10, exact=True).how.approximate == 0


def test_an_aim_that_no_effort_reaches_leaves_the_segment_exact_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def blind(_: object, queries: np.ndarray, c: int, *rest: object) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((len(queries), c), np.float32), np.zeros((len(queries), c), np.int64)

    monkeypatch.setattr(approximate.Approximate, "search", blind)
    shard = SegmentedShard(DIM, Cosine(), IndexConfig())
    shard.upsert(range(100), vectors(Cosine(), 100))

    work(shard)

    assert len(shard.segments) == 1
    assert recall(shard, vectors(Cosine(), 5, seed=3)) == 1.0
    (told,) = [record.msg for record in caplog.records if isinstance(record.msg, Event)]
    assert (told.name, told.fields["aim"], told.fields["items"]) == ("recall_not_reached", 0.99, 100)
    assert told.fields["reached"] < 0.5


def test_what_has_no_clusters_reaches_the_aim_too() -> None:
    """Rows that are there, or lie between others, are found more easily than queries: they are no sample."""
    random = np.random.default_rng(0)
    x, queries = (Cosine().normalise(random.normal(size=(n, DIM)).astype(np.float32)) for n in (3000, 1000))
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    shard.upsert(range(3000), x)
    work(shard)

    assert shard.search(queries, 10).how.approximate == 3000
    assert recall(shard, queries) >= 0.99


def test_copies_of_one_vector_are_no_reason_to_compare_every_item() -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig())
    shard.upsert(range(1000), np.repeat(vectors(Cosine(), 50), 20, axis=0))
    work(shard)

    assert shard.indexed() == 1000


def test_one_query_asked_again_and_again_is_no_sample_to_measure_an_index_with() -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig())
    shard.upsert(range(100), vectors(Cosine(), 100))
    work(shard)
    for _ in range(300):
        shard.search(vectors(Cosine(), 1, seed=3), 10)
    shard.upsert(range(100, 200), vectors(Cosine(), 100, seed=1))
    repeated = shard.freeze()
    for query in vectors(Cosine(), 200, seed=4):
        shard.search(query[None], 10)
    different = shard.freeze()

    assert repeated is not None
    assert repeated.sample() is None
    assert different is not None
    assert (queries := different.sample()) is not None
    assert len(queries) == 201


@pytest.mark.parametrize("asked", [100, 300])
def test_of_what_was_asked_only_the_last_queries_are_kept(asked: int) -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig())
    shard.upsert(range(100), vectors(Cosine(), 100))
    work(shard)
    requests = [vectors(Cosine(), asked, seed=seed) for seed in range(4)]
    for queries in requests:
        shard.search(queries, 10)
    shard.upsert(range(100, 200), vectors(Cosine(), 100, seed=1))
    job, last = shard.freeze(), np.concatenate(requests)[-segments.REMEMBERED :]
    gone = [weakref.ref(queries) for queries in requests]
    del requests, queries

    assert job is not None
    assert np.array_equal(np.stack(job.asked), last)
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

    assert (shard.held(), shard.count()) == (41, 41)
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
    assert (shard.held(), shard.count()) == (80, 80)
    np.testing.assert_array_equal(shard.fetch([7]), earlier[7:8])


@pytest.mark.parametrize("together", [False, True], ids=["anywhere", "together"])
def test_each_of_several_segments_is_searched_for_its_share_and_once_more_where_it_gave_more(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MERGED_TOGETHER", 100)
    monkeypatch.setattr(approximate, "NODE_COST", 1)  # as in larger segments, where a graph is faster than a scan
    rows, queries = vectors(Cosine(), 2000, centres=200), vectors(Cosine(), 200, seed=3, centres=200)
    rows = rows[np.argsort(rows[:, 0])] if together else rows
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW, recall=0.95))
    for start in range(0, 2000, 500):
        shard.upsert(range(start, start + 500), rows[start : start + 500])
        work(shard)
    asked: list[tuple[float, int]] = []
    search = segment.Segment.search

    def noted(one: segment.Segment, queries: np.ndarray, *args: Any, part: float = 1.0, **options: Any) -> Any:
        asked.append((part, len(queries)))
        return search(one, queries, *args, part=part, **options)

    monkeypatch.setattr(segment.Segment, "search", noted)
    found = shard.search(queries, 10)
    again = [count for part, count in asked if part == 1]
    assert [part for part, _ in asked][:4] == [0.25] * 4
    assert found.slots_QK.shape == (200, 10)
    assert found.sure == 10
    assert max(again, default=0) < 200 / (1 if together else 4)
    assert recall(shard, queries) >= 0.95


def test_another_configuration_is_taken_up_while_it_serves() -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    shard.upsert(range(100), vectors(Cosine(), 100))
    work(shard)
    shard.config = IndexConfig(kind=IndexKind.IVF)
    work(shard)

    (sealed,) = shard.segments
    assert sealed.tuned is not None
    assert sealed.tuned.index.kind is IndexKind.IVF


def test_an_index_is_left_where_comparing_every_row_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    shard.upsert(range(4000), vectors(Cosine(), 4000))
    work(shard)
    queries = vectors(Cosine(), 3, seed=3)
    assert shard.search(queries, 10).how.approximate == 4000

    monkeypatch.setattr(segment, "SCANNED_COST", 0.001)
    shard.delete([0])

    assert shard.search(queries, 10).how == Scanned(3999)


def test_queries_that_are_compared_one_by_one_after_all_are_told() -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    stored = vectors(Cosine(), 4000, centres=40)
    shard.upsert(range(4000), stored)
    work(shard)
    query = vectors(Cosine(), 1, seed=3, centres=40)
    near = (stored @ query.T)[:, 0]

    assert shard.search(query, 10, near < np.quantile(near, 0.5)).how.exact == 2000
    assert shard.search(query, 10, near >= np.quantile(near, 0.5)).how.exact == 0
