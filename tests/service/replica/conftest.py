"""A gallery in segments and in a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from index.engines.memory import segments
from service.replica import snapshots
from staging.states.small_shards import index_few
from staging.states.snapshot_world import NAMES, SnapshotWorld


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments and snapshots of a few items, which are due at once."""
    index_few(monkeypatch, 6)
    monkeypatch.setattr(segments, "SEAL_ROWS", 4)
    monkeypatch.setattr(segments, "MERGE_FACTOR", 2)
    monkeypatch.setattr(snapshots, "SETTLED", 0)


@pytest.fixture
def world(tmp_path: Path, small: None) -> Iterator[SnapshotWorld]:
    made = SnapshotWorld(tmp_path)
    yield made
    made.database.close()


@pytest.fixture
def sealed(world: SnapshotWorld) -> SnapshotWorld:
    """All of it in segments and in one snapshot."""
    world.seal()
    world.snapshot()
    assert world.loaded().snapshot_seq == len(NAMES)
    return world
