"""A process killed at any point of a snapshot, and any order of writes, snapshots and kills."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.replica import snapshots
from staging.states.crash_points import CrashPoints, Killed
from staging.states.snapshot_world import NAMES, shown
from staging.states.snapshot_world import SnapshotWorld as World

COLUMNS = ["keys", "seqs", "texts", "places", "held-0-items", "held-0-digests", "held-1-items", "held-1-digests"]
WRITTEN = ["mkdir", *(f"write {name}.npy" for name in COLUMNS), "sync", "write manifest.json", "sync", "rename", "sync"]
POINTS = [*WRITTEN, "record_snapshot", *["unlink"] * (len(COLUMNS) + 1), "rmdir"]
"""All that happens to files and rows while a gallery of two versions is written down and the oldest snapshot removed:
the code has no point that is not here."""
ENDS = [(number, torn) for number, name in enumerate(POINTS) for torn in sorted({False, name.startswith("write")})]
QUICK = {0, *map(POINTS.index, ("write manifest.json", "rename", "record_snapshot")), len(POINTS) - 3}
"""Of these the others are variations."""
AND_ROWS = [(snapshots, "record_snapshot")]


@pytest.fixture
def thrice(sealed: World) -> World:
    """Two snapshots are there, and something to be written down by a third, which sweeps the first."""
    for name in ("x", "y"):
        sealed.add(2, *NAMES[:4])
        sealed.write(1, name)
        sealed.seal()
        sealed.snapshot()
    sealed.write(1, "z")
    sealed.replica.refresh(1)
    return sealed


def test_no_point_of_a_snapshot_is_left_out(thrice: World) -> None:
    with CrashPoints(thrice.settings.indexes).watched(*AND_ROWS) as seen:
        thrice.snapshot()
    assert seen == POINTS


@pytest.mark.parametrize(
    ("number", "torn"),
    [pytest.param(number, torn, marks=[] if number in QUICK else [pytest.mark.slow]) for number, torn in ENDS],
)
def test_a_process_that_ends_at_any_point_of_a_snapshot_leaves_one_that_is_whole(
    thrice: World, number: int, torn: bool
) -> None:
    before, seq = thrice.loaded().snapshot_seq, thrice.loaded().seq
    with CrashPoints(thrice.settings.indexes, number, torn=torn).watched(*AND_ROWS), pytest.raises(Killed):
        thrice.snapshot()
    thrice.start()
    assert shown(thrice.loaded()) == shown(thrice.rebuilt())
    named = number > POINTS.index("record_snapshot")
    assert thrice.loaded().snapshot_seq == (seq if named else before)
    thrice.write(1, "after")
    thrice.snapshot()
    thrice.start()
    assert thrice.loaded().snapshot_seq == seq + 1
    assert len(list((thrice.loaded().folder / snapshots.FOLDER).iterdir())) == snapshots.KEPT_FOLDERS


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["write", "add"]), st.sampled_from([1, 2]), st.sampled_from(NAMES)),
        st.tuples(st.just("delete"), st.just(1), st.sampled_from(NAMES)),
        st.tuples(st.just("deploy"), st.sampled_from([1, 2])),
        st.tuples(st.sampled_from(["seal", "snapshot", "start", "backup", "restore"])),
        st.tuples(st.just("killed"), st.integers(0, len(POINTS)), st.booleans()),
    ),
    max_size=30,
)


@pytest.mark.usefixtures("small")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12, deadline=None)
@given(operations=OPERATIONS)
def test_any_snapshot_and_the_feed_are_a_rebuild(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[Any, ...]]
) -> None:
    world = World(tmp_path_factory.mktemp("w"))
    for name, *args in operations:
        if name != "killed":
            getattr(world, name)(*args)
        else:
            world.seal()
            points = CrashPoints(world.settings.indexes, args[0], torn=args[1])
            with points.watched(*AND_ROWS), suppress(Killed):  # or nothing was due
                world.snapshot()
            world.start()
    world.start()
    assert shown(world.loaded()) == shown(world.rebuilt())
    world.seal()
    world.snapshot()
    world.start()
    assert shown(world.loaded()) == shown(world.rebuilt())
    world.database.close()
