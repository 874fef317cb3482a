"""index.engines.merging: a graph takes the rows of segments that join it, and answers as one that was built anew."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from index.engines import approximate, merging, segment, segments
from index.engines.config import IndexConfig, IndexKind, Storage
from index.engines.segments import SegmentedShard
from index.space import Cosine

DIM, ROWS, MORE = 8, 400, 100


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that were added to any index, call by call."""
    monkeypatch.setattr(segment, "MIN_APPROXIMATE", 40)
    monkeypatch.setattr(segments, "SEAL_ROWS", 30)
    counted: list[int] = []
    add = approximate.Approximate.add

    def count(self: approximate.Approximate, rows: Any) -> None:
        counted.append(len(rows))
        add(self, rows)

    monkeypatch.setattr(approximate.Approximate, "add", count)
    return counted


def vectors(count: int, seed: int) -> Any:
    return Cosine().normalise(np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32))


def work(shard: SegmentedShard) -> None:
    while (job := shard.freeze()) is not None:
        assert job.run()
        shard.finish(job)
        job.clear()


@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "in files"])
@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize(("deleted", "anew"), [(20, False), (60, True)])
def test_a_graph_grows_by_what_is_written_unless_many_of_its_rows_are_dead(
    storage: Storage, kept: bool, deleted: int, anew: bool, added: list[int], tmp_path: Path
) -> None:
    config = IndexConfig(kind=IndexKind.HNSW, storage=storage, recall=0.9)
    shard = SegmentedShard(DIM, Cosine(), config, tmp_path if kept else None)
    first, more = vectors(ROWS, 0), vectors(MORE, 1)
    shard.upsert(range(ROWS), first)
    work(shard)
    shard.delete(range(deleted))
    shard.upsert([*range(deleted, deleted + 10), *range(ROWS, ROWS + MORE - 10)], more)  # some are replaced
    added.clear()
    work(shard)

    assert sum(added) == (MORE if not anew else ROWS - deleted - 10 + MORE)
    assert [one.held() for one in shard.segments] == [shard.held()] == [ROWS - deleted + MORE - 10]
    right = np.concatenate([more[:10], first[deleted + 10 :], more[10:]])
    np.testing.assert_array_equal(shard.fetch(range(deleted, ROWS + MORE - 10)), right)
    queries = vectors(50, 2)
    found, exact = (shard.search(queries, 10, exact=exact).slots_QK for exact in (False, True))
    assert exact.min() >= deleted
    assert np.mean([len({*a} & {*b}) / 10 for a, b in zip(found.tolist(), exact.tolist(), strict=True)]) >= 0.9
    if kept:
        after = SegmentedShard(DIM, Cosine(), config, tmp_path)
        after.upsert(range(deleted, ROWS + MORE - 10), right)
        assert (after.held(), after.indexed()) == (shard.held(), shard.indexed())
        np.testing.assert_array_equal(after.search(queries, 10).slots_QK, found)


def test_a_graph_that_grew_and_misses_the_aim_is_built_anew(monkeypatch: pytest.MonkeyPatch, added: list[int]) -> None:
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW))
    shard.upsert(range(ROWS), vectors(ROWS, 0))
    work(shard)
    shard.upsert(range(ROWS, ROWS + MORE), vectors(MORE, 1))
    added.clear()
    outcomes = iter([(None, 0.5), ([[10] * 4] * 3, 1.0)])
    monkeypatch.setattr(segment, "tune", lambda *_: next(outcomes))
    work(shard)

    assert shard.indexed() == ROWS + MORE
    assert sum(added) == MORE - MORE // 4 + ROWS + MORE


@pytest.mark.parametrize(
    ("kind", "held", "unindexed", "at_rest", "joined"),
    [
        (IndexKind.HNSW, [], [50, 60], False, [50, 60]),
        (IndexKind.HNSW, [400], [50], False, [50, 400]),
        (IndexKind.HNSW, [401], [50], False, [50]),
        (IndexKind.HNSW, [401, 3000], [60], False, [60, 401, 3000]),
        (IndexKind.HNSW, [401], [50], True, [50, 401]),
        (IndexKind.HNSW, [50, 1000], [], False, []),
        (IndexKind.HNSW, [50, 1000], [], True, [50, 1000]),
        (IndexKind.HNSW, [50, 60, 1000], [], False, [50, 60, 1000][:2]),
        (IndexKind.IVF, [101], [50], True, [50]),
        (IndexKind.IVF, [100], [50], True, [50, 100]),
        (IndexKind.HNSW, [50], [], True, []),
    ],
)
def test_what_has_no_index_joins_graphs_that_are_not_too_large_for_it(
    kind: IndexKind, held: list[int], unindexed: list[int], at_rest: bool, joined: list[int]
) -> None:
    config = IndexConfig(kind=kind)

    def of(rows: int, config: IndexConfig | None) -> Any:
        return SimpleNamespace(held=lambda: rows, config=config, dead=0, keys_R=np.zeros(rows))

    given = [*(of(rows, config) for rows in held), *(of(rows, None) for rows in unindexed)]
    assert [one.held() for one in merging.due(given, config, at_rest=at_rest)] == joined
