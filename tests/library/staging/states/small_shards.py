"""Shards whose segments have a few dozen rows, in clusters, and their pending jobs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from index.engines.memory import segment, segments
from index.engines.memory.segments import SegmentedShard
from index.space import Space

DIM = 16


def index_few(patch: pytest.MonkeyPatch, rows: int) -> None:
    """Index from this many rows on, and search by the index although a scan would be cheaper."""
    patch.setattr(segment, "MIN_APPROXIMATE", rows)
    patch.setattr(segment, "SCANNED_COST", 1.0)


def make_shards_small(patch: pytest.MonkeyPatch) -> None:
    """Seal, index and merge few rows."""
    index_few(patch, 40)
    patch.setattr(segment, "SAMPLE_ROWS", 256)
    patch.setattr(segments, "SEAL_ROWS", 30)
    patch.setattr(segments, "MERGE_FACTOR", 2)


def vectors(space: Space, count: int, seed: int = 0, centres: int = 20) -> np.ndarray:
    random = np.random.default_rng(seed)
    around = np.random.default_rng(99).normal(size=(centres, DIM))
    x = around[random.integers(0, centres, count)] + 0.4 * random.normal(size=(count, DIM))
    return space.normalise(x.astype(np.float32))


def work(shard: SegmentedShard, beside: Callable[[], None] = lambda: None) -> None:
    """Run all pending jobs of a shard; `beside` is called while each index is built."""
    while (job := shard.freeze()) is not None:
        job.run()
        beside()
        shard.finish(job)
