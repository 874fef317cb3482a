"""When index.engines.memory.segments seals a head, and which segments it merges, keeps apart or sweeps of dead rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.engines.config import IndexConfig, IndexKind
from index.engines.memory import approximate, segment, segments, tuning
from index.engines.memory.segments import SegmentedShard
from index.engines.memory.tuning import TuningResult
from index.space import Cosine
from staging.states.small_shards import DIM, make_shards_small, vectors, work


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_shards_small(monkeypatch)


def test_a_smaller_head_is_sealed_once_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEAL_ROWS", 1000)
    monkeypatch.setattr(segments, "SETTLED_ROWS", 50)
    shard = SegmentedShard(DIM, Cosine(), IndexConfig())
    shard.upsert(range(100), vectors(Cosine(), 100))
    work(shard)
    assert shard.segments == ()

    monkeypatch.setattr(segments, "SETTLED_SECONDS", 0.0)
    work(shard)

    assert (len(shard.segments), shard.head.count()) == (1, 0)


def test_a_head_that_outgrew_what_one_index_holds_becomes_several_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LARGEST_SEALED", 50)
    monkeypatch.setattr(segments, "MERGE_FACTOR", 100)
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    shard.upsert(range(120), vectors(Cosine(), 120))
    work(shard)
    assert [len(one.keys_R) for one in shard.segments] == [40, 40, 40]
    assert shard.search(vectors(Cosine(), 120), 1).slots_QK[:, 0].tolist() == list(range(120))


def test_a_few_segments_become_one_once_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LARGEST_SEALED", 200)
    monkeypatch.setattr(segments, "MERGE_FACTOR", 100)
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    for start, end in ((0, 60), (60, 100), (100, 180), (180, 330)):
        shard.upsert(range(start, end), vectors(Cosine(), end - start, seed=start))
        work(shard)
    assert sorted(len(one.keys_R) for one in shard.segments) == [40, 60, 80, 150]

    monkeypatch.setattr(segments, "SETTLED_SECONDS", 0.0)
    work(shard)
    assert sorted(len(one.keys_R) for one in shard.segments) == [150, 180]
    assert shard.indexed_count() == 330


def test_segments_of_one_size_are_merged_and_many_dead_rows_are_swept() -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    for start in range(0, 400, 100):
        shard.upsert(range(start, start + 100), vectors(Cosine(), 100, seed=start))
        work(shard)
    assert [len(one.keys_R) for one in shard.segments] == [400]

    shard.delete(range(200))
    work(shard)
    assert [len(one.keys_R) for one in shard.segments] == [200]


def test_lists_do_while_items_come_fast_and_a_graph_is_tried_once_they_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approximate, "NODE_COST", 0.1)
    monkeypatch.setattr(segment, "FEW_LISTS", 0)

    def held() -> list[tuple[IndexKind, bool]]:
        return [(one.tuned.index.kind, one.provisional) for one in shard.segments if one.tuned]

    shard = SegmentedShard(DIM, Cosine(), IndexConfig(), tmp_path)
    shard.upsert(range(100), vectors(Cosine(), 100))
    work(shard)
    assert held() == [(IndexKind.IVF, True)]

    shard = SegmentedShard(DIM, Cosine(), IndexConfig(), tmp_path)
    shard.upsert(range(100), vectors(Cosine(), 100))
    work(shard)
    assert held() == [(IndexKind.IVF, True)]
    monkeypatch.setattr(segments, "FILLED_SECONDS", 0.0)
    work(shard)
    assert held() == [(IndexKind.HNSW, False)]


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SegmentedShard:
    """Four segments of 100 rows, as no index of more reaches the aim."""
    tuned = tuning.tune

    def tune(index: Any, space: Any, rows: np.ndarray, *about: Any) -> Any:
        return tuned(index, space, rows, *about) if len(rows) <= 100 else TuningResult(None, 0.5)

    monkeypatch.setattr("index.engines.memory.segment.tune", tune)
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW), tmp_path)
    for start in range(0, 400, 100):
        shard.upsert(range(start, start + 100), vectors(Cosine(), 100, seed=start))
        work(shard)
    return shard


def test_segments_whose_one_index_would_find_too_little_keep_theirs(apart: SegmentedShard) -> None:
    assert [len(one.keys_R) for one in apart.segments] == [100] * 4
    assert apart.indexed_count() == 400
    apart.config = IndexConfig(kind=IndexKind.HNSW, recall=0.9)
    work(apart)
    assert [(len(one.keys_R), one.config) for one in apart.segments] == [(100, apart.config)] * 4


def test_segments_that_stay_apart_do_so_after_a_restart(apart: SegmentedShard, tmp_path: Path) -> None:
    after = SegmentedShard(DIM, Cosine(), apart.config, tmp_path)
    assert len(after.segments) == 4
    for start in range(0, 400, 100):
        after.upsert(range(start, start + 100), vectors(Cosine(), 100, seed=start))
    assert (after.count(), after.indexed_count(), after.freeze()) == (400, 400, None)


def test_segments_whose_one_index_would_take_longer_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = tuning.tune

    def tune(index: Any, space: Any, rows: np.ndarray, *about: Any) -> Any:
        measured = tuned(index, space, rows, *about)
        dear = [effort * 40 for effort in measured.efforts]
        return measured if len(rows) <= 60 else measured._replace(efforts=dear)

    monkeypatch.setattr("index.engines.memory.segment.tune", tune)
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    for start in range(0, 120, 60):
        shard.upsert(range(start, start + 60), vectors(Cosine(), 60, seed=start))
        work(shard)
    assert [len(one.keys_R) for one in shard.segments] == [60, 60]


def test_many_dead_rows_of_segments_that_stay_apart_are_swept(apart: SegmentedShard) -> None:
    apart.delete(range(60))
    work(apart)
    assert sorted(len(one.keys_R) for one in apart.segments) == [40, 100, 100, 100]
    assert apart.indexed_count() == 340
