"""index.engines.memory.snapshot: a start finds what was sealed, which counts as far as the feed says the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from index.engines.config import IndexConfig, IndexKind, Storage
from index.engines.memory import approximate, segment, segments
from index.engines.memory.segments import SegmentedShard
from index.engines.memory.snapshot import DIGESTS, INDEX, KEYS, MANIFEST
from index.space import Cosine, Lorentz, Space
from staging.states.crash_points import CrashPoints, Killed

DIM, ROWS = 8, 60


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "MIN_APPROXIMATE", 10)
    monkeypatch.setattr(approximate, "NODE_COST", 0)
    monkeypatch.setattr(segments, "SEAL_ROWS", 30)


def vectors(space: Space, count: int = ROWS, seed: int = 0) -> np.ndarray:
    return space.normalise(np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32))


def work(shard: SegmentedShard) -> None:
    while (job := shard.freeze()) is not None:
        assert job.run()
        shard.finish(job)
        job.remove_replaced()


def sealed(folder: Path, space: Space = Cosine(), **config: object) -> SegmentedShard:  # noqa: B008
    shard = SegmentedShard(DIM, space, IndexConfig(kind=IndexKind.HNSW, **config), folder)
    shard.upsert(range(ROWS), vectors(space))
    work(shard)
    return shard


def names(folder: Path) -> list[Path]:
    return [name for name in folder.iterdir() if name.is_dir()]


@pytest.mark.parametrize("space", [Cosine(), Lorentz(0.5)], ids=lambda space: space.kind)
@pytest.mark.parametrize("storage", list(Storage))
def test_another_start_maps_what_was_sealed_and_answers_alike(tmp_path: Path, space: Space, storage: Storage) -> None:
    before, queries = sealed(tmp_path, space, storage=storage), vectors(space, 5, seed=9)

    after = SegmentedShard(DIM, space, before.config, tmp_path)
    assert (after.count(), len(after.segments)) == (0, 1)
    after.upsert(range(ROWS), vectors(space))

    assert (after.count(), after.head.count(), after.indexed_count()) == (ROWS, 0, ROWS)
    assert after.freeze() is None
    for ours, theirs in zip(after.search(queries, 10)[:2], before.search(queries, 10)[:2], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gone=st.sets(st.integers(0, ROWS - 1)), other=st.sets(st.integers(0, ROWS - 1)), data=st.data())
def test_what_changed_since_is_as_the_feed_says(
    tmp_path_factory: pytest.TempPathFactory, gone: set[int], other: set[int], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    config = sealed(folder).config
    now = vectors(Cosine())
    now[sorted(other)] = vectors(Cosine(), len(other), seed=5)
    left = [key for key in range(ROWS) if key not in gone]

    after = SegmentedShard(DIM, Cosine(), config, folder)
    for start in range(0, len(left), 7):
        block = left[start : start + 7]
        after.upsert(block, now[block])
    again = data.draw(st.lists(st.sampled_from(left), unique=True, max_size=10)) if left else []
    after.upsert(again, now[again])

    assert after.count() == len(left)
    assert np.array_equal(after.fetch(left), now[left])
    assert after.head.count() == len(other - gone)
    work(after)
    assert after.count() == len(left)


@pytest.mark.parametrize("file", [MANIFEST, KEYS, DIGESTS, INDEX])
@pytest.mark.parametrize("harm", ["cut", "changed", "gone"])
def test_damaged_files_are_dropped_and_nothing_is_lost(tmp_path: Path, file: str, harm: str) -> None:
    config = sealed(tmp_path).config
    (name,) = names(tmp_path)
    content = (name / file).read_bytes()
    (name / file).unlink()
    if harm != "gone":
        middle = len(content) // 2
        (name / file).write_bytes(
            content[:middle] if harm == "cut" else content[:middle] + b"?" + content[middle + 1 :]
        )

    after = SegmentedShard(DIM, Cosine(), config, tmp_path)
    assert after.segments == ()
    assert names(tmp_path) == []
    after.upsert(range(ROWS), vectors(Cosine()))
    work(after)
    assert after.indexed_count() == ROWS


@pytest.mark.parametrize(
    "changes", [{"efforts": ..., "effort": 8, "thin_effort": 32}, {"format": 2}, {"format": 4}, {"codes": "new"}]
)
def test_a_manifest_of_an_older_or_newer_program_is_dropped_and_built_anew(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    config = sealed(tmp_path).config
    (name,) = names(tmp_path)
    manifest = {**json.loads((name / MANIFEST).read_text()), **changes}
    (name / MANIFEST).write_text(json.dumps({key: value for key, value in manifest.items() if value is not ...}))

    after = SegmentedShard(DIM, Cosine(), config, tmp_path)
    assert after.segments == ()
    after.upsert(range(ROWS), vectors(Cosine()))
    work(after)
    assert after.indexed_count() == ROWS


def test_a_write_that_was_killed_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise OSError(28, "No space left on device")

    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW), tmp_path)
    shard.upsert(range(ROWS), vectors(Cosine()))
    job = shard.freeze()
    assert job is not None
    with monkeypatch.context() as broken:
        broken.setattr("index.engines.memory.snapshot.sync_all", die)
        with pytest.raises(OSError, match="No space"):
            job.run()

    assert list(tmp_path.iterdir()) == []
    assert shard.count() == ROWS
    work(shard)
    assert shard.indexed_count() == ROWS
    (tmp_path / ".incoming-killed").mkdir()
    assert len(SegmentedShard(DIM, Cosine(), shard.config, tmp_path).segments) == 1
    assert len(list(tmp_path.iterdir())) == 1


SEALED = ["mkdir", "write keys.npy", "write digests.npy", "write index.faiss", "write rows.npy"]
SEALED += ["sync", "write manifest.json", "sync", "rename", "sync"]
REMOVED = ["unlink"] * 5 + ["rmdir"]
POINTS = SEALED + 2 * REMOVED
"""All that happens to files while two segments become one; the code has no point that is not here."""
ENDS = [(number, torn) for number, name in enumerate(POINTS) for torn in sorted({False, name.startswith("write")})]


def to_be_merged(folder: Path, patch: pytest.MonkeyPatch) -> SegmentedShard:
    """Two segments; their indexes keep codes, so that there are files of every kind."""
    shard = SegmentedShard(DIM, Cosine(), IndexConfig(kind=IndexKind.HNSW, storage=Storage.FLOAT16), folder)
    for start in (0, 30):
        shard.upsert(range(start, start + 30), vectors(Cosine())[start : start + 30])
        work(shard)
    patch.setattr(segments, "MERGE_FACTOR", 2)
    return shard


def test_no_point_of_a_merge_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = to_be_merged(tmp_path, monkeypatch)
    with CrashPoints(tmp_path).watched() as seen:
        work(shard)
    assert seen == POINTS


@pytest.mark.parametrize(("number", "torn"), ENDS)
def test_a_process_that_ends_at_any_point_of_a_merge_leaves_files_that_are_whole_or_count_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, torn: bool
) -> None:
    shard = to_be_merged(tmp_path, monkeypatch)
    with CrashPoints(tmp_path, number, torn=torn).watched(), pytest.raises(Killed):
        work(shard)

    after = SegmentedShard(DIM, Cosine(), shard.config, tmp_path)
    assert len(after.segments) == len(list(tmp_path.iterdir())) > 0
    if number <= POINTS.index("rename"):
        assert len(after.segments) == 2
    after.upsert(range(ROWS), vectors(Cosine()))
    assert after.head.row_count() == 0, "nothing was lost: two are removed when one is there in their place"
    work(after)
    assert (after.count(), after.indexed_count(), len(names(tmp_path))) == (ROWS, ROWS, 1)
    queries = vectors(Cosine(), 5, seed=9)
    ours, theirs = after.search(queries, 10), shard.search(queries, 10, exact=True)
    np.testing.assert_allclose(ours.scores_QK, theirs.scores_QK, rtol=1e-6)
    np.testing.assert_array_equal(ours.slots_QK, theirs.slots_QK)


def test_the_files_of_what_was_merged_are_removed(tmp_path: Path) -> None:
    shard = sealed(tmp_path)
    shard.delete(range(0, ROWS, 2))
    work(shard)
    assert (len(names(tmp_path)), len(shard.segments)) == (1, 1)

    shard.delete(range(ROWS))
    work(shard)
    assert (names(tmp_path), shard.segments) == ([], ())


def test_segments_of_another_space_are_not_taken_over(tmp_path: Path) -> None:
    config = sealed(tmp_path).config

    assert SegmentedShard(DIM, Lorentz(), config, tmp_path).segments == ()
