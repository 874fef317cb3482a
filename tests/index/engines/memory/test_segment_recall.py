"""index.engines.memory.segments: what an index finds of what comparing every vector finds, and when one is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.engines.base import Scanned
from index.engines.config import IndexConfig, IndexKind, Storage
from index.engines.memory import approximate, segment, segments
from index.engines.memory.segments import SegmentedShard
from index.events import Event
from index.space import Cosine, Euclidean, Lorentz, Space
from staging.states.small_shards import DIM, make_shards_small, vectors, work


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_shards_small(monkeypatch)


def recall(shard: SegmentedShard, queries: np.ndarray, allowed: np.ndarray | None = None, k: int = 10) -> float:
    found, right = shard.search(queries, k, allowed)[1], shard.search(queries, k, allowed, exact=True)[1]
    return float(
        np.mean([len(set(a) & set(b)) / len(set(b)) for a, b in zip(found.tolist(), right.tolist(), strict=True)])
    )


@pytest.mark.parametrize(
    ("space", "kind", "storage"),
    [
        (Cosine(), IndexKind.HNSW, Storage.FLOAT32),
        (Euclidean(), IndexKind.IVF, Storage.FLOAT32),
        (Lorentz(0.5), IndexKind.HNSW, Storage.FLOAT32),
        (Cosine(), IndexKind.IVF, Storage.FLOAT16),
        (Euclidean(), IndexKind.HNSW, Storage.FLOAT16),
        (Lorentz(0.5), IndexKind.IVF, Storage.FLOAT16),
        (Cosine(), IndexKind.HNSW, Storage.INT8),
        (Euclidean(), IndexKind.IVF, Storage.INT8),
        (Lorentz(0.5), IndexKind.HNSW, Storage.INT8),
    ],
    ids=str,
)
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

    assert shard.search(queries, 10).scanned.approximate == 4000
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
        efforts.append(hits.scanned.effort)

    low, lowest, own, same, high, higher, none = efforts
    assert 0 < low == lowest < own == same < high <= higher
    assert none == 0, "an aim that was never reached is for an exact search"
    again = SegmentedShard(DIM, Cosine(), shard.config, tmp_path)
    again.upsert(range(2500), x)
    assert again.search(queries, 10, recall=0.8).scanned.effort == lowest


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
def test_recall_holds_for_lists_of_any_length(kind: IndexKind) -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=kind))
    shard.upsert(range(4000), vectors(Cosine(), 4000, centres=200))
    work(shard)

    for k in (20, 50, 300, 1500):
        assert recall(shard, vectors(Cosine(), 60, seed=3, centres=200), k=k) >= 0.97, k


def test_few_allowed_items_are_compared_one_by_one_and_many_are_not() -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig())
    shard.upsert(range(4000), vectors(Cosine(), 4000))
    work(shard)
    queries, allowed = vectors(Cosine(), 2, seed=3), np.zeros(4000, np.bool_)
    allowed[:20] = True

    assert shard.search(queries, 10, allowed).scanned.exact == 20
    assert shard.search(queries, 10, ~allowed).scanned.approximate == 3980
    assert shard.search(queries, 10, exact=True).scanned.approximate == 0


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
    fields: dict[str, Any] = told.fields
    assert (told.name, fields["aim"], fields["items"]) == ("recall_not_reached", 0.99, 100)
    assert fields["reached"] < 0.5


def test_what_has_no_clusters_reaches_the_aim_too() -> None:
    """Rows that are there, or lie between others, are found more easily than queries: they are no sample."""
    random = np.random.default_rng(0)
    x, queries = (Cosine().normalise(random.normal(size=(n, DIM)).astype(np.float32)) for n in (3000, 1000))
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    shard.upsert(range(3000), x)
    work(shard)

    assert shard.search(queries, 10).scanned.approximate == 3000
    assert recall(shard, queries) >= 0.99


@pytest.mark.parametrize(
    ("space", "length"), [(Euclidean(), 1e-8), (Euclidean(), 1e8), (Lorentz(1e12), 1e-6), (Lorentz(1e-6), 1e3)], ids=str
)
def test_neighbours_are_told_apart_at_any_unit_of_length(space: Space, length: float) -> None:
    x = np.float32(length) * np.random.default_rng(0).normal(size=(4200, DIM)).astype(np.float32)
    shard = SegmentedShard(DIM, space, IndexConfig(kind=IndexKind.HNSW, recall=0.95))
    shard.upsert(range(4000), x[:4000])
    work(shard)

    assert recall(shard, x[4000:]) >= 0.94


def test_copies_of_one_vector_are_no_reason_to_compare_every_item() -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig())
    shard.upsert(range(1000), np.repeat(vectors(Cosine(), 50), 20, axis=0))
    work(shard)

    assert shard.indexed_count() == 1000


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


def test_an_index_is_left_where_comparing_every_row_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    shard.upsert(range(4000), vectors(Cosine(), 4000))
    work(shard)
    queries = vectors(Cosine(), 3, seed=3)
    assert shard.search(queries, 10).scanned.approximate == 4000

    monkeypatch.setattr(segment, "SCANNED_COST", 0.001)
    shard.delete([0])

    assert shard.search(queries, 10).scanned == Scanned(3999)


@pytest.mark.parametrize("together", [False, True], ids=["anywhere", "together"])
def test_each_of_several_segments_is_searched_for_its_share_and_once_more_where_it_gave_more(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MERGE_FACTOR", 100)
    monkeypatch.setattr(approximate, "NODE_COST", 1)  # as in larger segments, where a graph is faster than a scan
    rows, queries = vectors(Cosine(), 2000, centres=200), vectors(Cosine(), 200, seed=3, centres=200)
    rows = rows[np.argsort(rows[:, 0])] if together else rows
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW, recall=0.95))
    for start in range(0, 2000, 500):
        shard.upsert(range(start, start + 500), rows[start : start + 500])
        work(shard)
    asked: list[tuple[float, int]] = []
    search = segment.Segment.search

    def noted(one: segment.Segment, queries: np.ndarray, *args: Any, share: float = 1.0, **options: Any) -> Any:
        asked.append((share, len(queries)))
        return search(one, queries, *args, share=share, **options)

    monkeypatch.setattr(segment.Segment, "search", noted)
    found = shard.search(queries, 10)
    again = [count for share, count in asked if share == 1]
    assert [share for share, _ in asked][:4] == [0.25] * 4
    assert found.slots_QK.shape == (200, 10)
    assert found.reliable == 10
    assert max(again, default=0) < 200 / (1 if together else 4)
    assert recall(shard, queries) >= 0.95


def test_a_segment_whose_filtered_list_ends_where_its_share_does_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of half of the rows seven of ten are expected at most; the eighth, not in the widened list, is the next best."""
    monkeypatch.setattr(segments, "MERGE_FACTOR", 100)
    monkeypatch.setattr(approximate, "NODE_COST", 0.1)
    directions = np.random.default_rng(0).normal(size=(1000, DIM))
    distance = np.r_[np.linspace(1, 2, 500), np.linspace(3, 4, 500)]
    rows = (directions / np.linalg.norm(directions, axis=1, keepdims=True) * distance[:, None]).astype(np.float32)
    shard = SegmentedShard(DIM, Euclidean(), IndexConfig(kind=IndexKind.HNSW, recall=0.95))
    for start in (0, 500):
        shard.upsert(range(start, start + 500), rows[start : start + 500])
        work(shard)
    query = np.zeros((1, DIM), np.float32)
    assert [one.tuned is not None for one in shard.segments] == [True, True]

    for near in range(6, 10):
        allowed = np.r_[np.arange(250) < near, np.ones(250, np.bool_), np.arange(500) % 2 == 0]
        assert recall(shard, query, allowed) == 1, near
