"""Segments that another process built: taken over row by row, they answer as what was there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.engines.config import IndexConfig, IndexKind
from index.engines.memory import segments
from index.engines.memory.segments import SegmentedShard
from index.gallery import Gallery
from index.space import Cosine
from service.replica.index_files import locked
from staging.inputs.builders import make_version
from staging.states.small_shards import index_few

DIM = 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    index_few(monkeypatch, 40)
    monkeypatch.setattr(segments, "SEAL_ROWS", 30)
    monkeypatch.setattr(segments, "MERGE_FACTOR", 2)
    monkeypatch.setattr("index.gallery.ADOPT_BATCH", 7)


@pytest.fixture
def galleries(tmp_path: Path) -> list[Gallery]:
    """Of two processes that follow one feed: the first builds."""
    version = make_version(tmp_path / "v1", "v1", DIM)
    made = [Gallery(IndexConfig(kind=IndexKind.HNSW), tmp_path / "indexes") for _ in range(2)]
    for one in made:
        one.declare(version)
    return made


def rows(count: int, seed: int = 0) -> Any:
    return Cosine().normalise(np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32))


def put(galleries: list[Gallery], keys: range, seed: int) -> None:
    for one in galleries:
        one.apply({("v1", "supplied"): (list(keys), rows(len(keys), seed))})


def answer(gallery: Gallery, exact: bool) -> Any:
    found = gallery.search("v1", lambda _: rows(9, 77), 8, exact=exact)
    return found.keys_QK.tolist()


def folders(gallery: Gallery) -> set[Path | None]:
    """Where the segments lie that it searches."""
    return {segment.folder for shard in gallery._shards.all() for segment in shard.segments if segment.row_count()}


def build(gallery: Gallery) -> None:
    while gallery.build_index():
        pass


def test_what_one_builds_the_other_takes_over(galleries: list[Gallery]) -> None:
    builds, follows = galleries
    put(galleries, range(100), 1)
    build(builds)
    put([follows], range(20, 30), 2)  # follows is ahead of what was built
    follows.apply({}, removed=[5])

    follows.adopt_segments()

    assert (builds.indexed_count(), follows.indexed_count()) == (100, 89)
    put([builds], range(20, 30), 2)
    builds.apply({}, removed=[5])
    assert answer(follows, exact=True) == answer(builds, exact=True)
    put(galleries, range(200, 300), 3)
    build(builds)  # and merges: the files of what it replaces are gone
    follows.adopt_segments()
    follows.adopt_segments()
    assert answer(follows, exact=True) == answer(builds, exact=True)
    assert follows.indexed_count() == builds.indexed_count() == sum(follows.items_by_version().values()) == 199
    assert folders(follows) == folders(builds)


def test_each_item_is_found_once_between_two_steps(galleries: list[Gallery], monkeypatch: pytest.MonkeyPatch) -> None:
    builds, follows = galleries
    put(galleries, range(100), 1)
    build(builds)
    before, seen = answer(follows, exact=True), []
    adopt = SegmentedShard.adopt

    def watched(shard: SegmentedShard, *args: Any) -> None:
        adopt(shard, *args)
        seen.append(sorted(shard.search(rows(1), 200, exact=True).slots_QK[0][:100].tolist()))

    monkeypatch.setattr(SegmentedShard, "adopt", watched)
    follows.adopt_segments()

    assert len(seen) == 15
    assert all(keys == list(range(100)) for keys in seen)
    assert answer(follows, exact=True) == before


def test_one_at_a_time_builds(tmp_path: Path) -> None:
    with locked(tmp_path / "1") as first, locked(tmp_path / "1") as second, locked(tmp_path / "2") as other:
        assert (first, second, other) == (True, False, True)
    with locked(tmp_path / "1") as second:
        assert second
