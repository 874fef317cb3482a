"""Any snapshot and the feed behind it are a rebuild from SQL; what is damaged or of another life is not used."""

from __future__ import annotations

import shutil

import pytest
from sqlalchemy import update

from index.engines.memory import segments
from service.replica import snapshots
from service.replica.load_progress import LoadProgress
from service.replica.replica import Replica
from service.store.galleries.change_feed import feed_of
from service.store.galleries.deletion import delete_gallery, forget_gallery, free_items
from service.store.galleries.gallery import take_seq
from service.store.galleries.snapshots import MAX_RECORDED, record_snapshot, snapshots_of
from service.store.tables import item
from service.upgrades.tombstones import TombstonePurger
from staging.states.crash_points import CrashPoints, Killed
from staging.states.snapshot_world import NAMES, shown
from staging.states.snapshot_world import SnapshotWorld as World


def test_a_start_reads_a_snapshot_and_what_came_since(sealed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed.write(2, "i1", "new")
    sealed.add(2, "i2")
    sealed.delete(1, "i3")
    sealed.deploy(2)
    monkeypatch.setattr("service.replica.loading.gallery_contents", None)
    sealed.start()
    assert shown(sealed.loaded()) == shown(sealed.rebuilt())
    assert sealed.loaded().snapshot_seq == len(NAMES)
    assert sealed.loaded().gallery.indexed_count() > 0


def test_a_snapshot_from_before_the_rows_of_deleted_items_went(sealed: World) -> None:
    sealed.delete(1, "i3", "i4")
    for _ in range(2):
        TombstonePurger(sealed.database, settle_seconds=0.0).look()
    sealed.write(1, "i3")
    sealed.start()
    assert shown(sealed.loaded()) == shown(sealed.rebuilt())
    assert sealed.loaded().snapshot_seq == len(NAMES)
    assert len(sealed.loaded().gallery.keys()) == len(NAMES) - 1


@pytest.mark.parametrize("kept", ["nothing", "segments", "snapshot"])
def test_a_load_counts_all_items_whatever_they_are_read_from(
    world: World, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    loads: list[LoadProgress] = []
    monkeypatch.setattr(
        "service.replica.replica.LoadProgress", lambda name: loads.append(LoadProgress(name)) or loads[-1]
    )
    if kept != "nothing":
        world.seal()
    if kept == "snapshot":
        world.snapshot()
    else:
        world.write(1, NAMES[0])
    loads.clear()
    world.start()
    world.loaded()
    assert [(load.gallery, load.total, load.done) for load in loads] == [("g", len(NAMES), len(NAMES))]


@pytest.mark.parametrize("harm", ["cut", "changed", "gone", "format", "emptied"])
def test_what_is_damaged_is_read_from_the_database(sealed: World, harm: str) -> None:
    (folder,) = (sealed.loaded().folder / snapshots.FOLDER).iterdir()
    file = folder / ("manifest.json" if harm == "format" else "texts.npy")
    content = file.read_bytes()
    if harm == "gone":
        file.unlink()
    elif harm == "emptied":
        shutil.rmtree(folder)
    else:
        changed = content.replace(b'"format": 1', b'"format": 9') if harm == "format" else content[:-1] + b"?"
        file.write_bytes(content[:20] if harm == "cut" else changed)
    sealed.write(1, "i1")
    sealed.start()
    assert (shown(sealed.loaded()), sealed.loaded().snapshot_seq) == (shown(sealed.rebuilt()), 0)
    assert not folder.exists()
    sealed.snapshot()
    sealed.start()
    assert sealed.loaded().snapshot_seq == len(NAMES) + 1


def test_a_snapshot_of_another_life_of_the_database_counts_for_nothing(sealed: World) -> None:
    """The database is restored, and gives the same numbers of the feed to other items."""
    sealed.backup()
    sealed.write(1, "i1", "lost")
    sealed.seal()
    sealed.snapshot()
    sealed.restore()
    sealed.write(1, "i2", "other", "third")
    sealed.start()
    assert sealed.loaded().snapshot_seq == len(NAMES)
    assert shown(sealed.loaded()) == shown(sealed.rebuilt())


def test_a_process_that_outlives_its_database_forgets_what_that_lost_and_has_no_snapshot_of_it_count(
    sealed: World,
) -> None:
    """As after a failover to a standby that lacked the last writes."""
    sealed.backup()
    sealed.write(1, "i1", *(f"lost{n}" for n in range(6)))
    sealed.seal()
    outlived = sealed.replica
    sealed.restore()
    outlived.write_snapshot(outlived.all()[0], settled=True)

    outlived._poll()

    assert shown(outlived.find("g")) == shown(sealed.rebuilt()) == shown(sealed.loaded())


def test_galleries_with_items_left_out_have_none(sealed: World) -> None:
    with sealed.database.write() as connection:
        connection.exec_driver_sql("delete from embedding where item_id = 2")
        connection.execute(update(item).where(item.c.id == 2).values(seq=take_seq(connection, 1, 1)))
    sealed.snapshot()
    assert sealed.loaded().snapshot_seq == len(NAMES)
    sealed.start()
    assert sealed.loaded().gallery.missing() == sealed.rebuilt().gallery.missing() == 1


def test_another_process_does_not_write_what_is_there(sealed: World) -> None:
    first, sealed.replica = sealed.replica, sealed.new_replica()
    sealed.write(1, "new")
    for replica in (first, sealed.replica):
        replica.refresh(1)
        replica.find("g").snapshot_seq = 0
        with CrashPoints(sealed.settings.indexes).watched((snapshots, "record_snapshot")) as seen:
            replica.write_snapshot(replica.find("g"), settled=True)
        assert bool(seen) == (replica is first)
    assert len(list((sealed.loaded().folder / snapshots.FOLDER).iterdir())) == 2
    with sealed.database.lookup() as connection:
        assert len(snapshots_of(connection, 1)) == 2


def test_galleries_without_segments_have_none(world: World) -> None:
    world.snapshot()
    assert not (world.loaded().folder / snapshots.FOLDER).exists()


@pytest.mark.parametrize(("settled", "changes"), [(True, 4), (False, 7)])
def test_one_is_due_once_more_than_a_share_of_the_items_has_changed(
    sealed: World, monkeypatch: pytest.MonkeyPatch, settled: bool, changes: int
) -> None:
    monkeypatch.setattr(snapshots, "SETTLED", 1 / 4)
    monkeypatch.setattr(snapshots, "GROWING", 1 / 2)
    for name in NAMES[:changes]:
        assert sealed.loaded().snapshot_seq == len(NAMES)
        sealed.write(1, name)
        sealed.replica.refresh(1)
        sealed.replica.write_snapshot(sealed.loaded(), settled=settled)
    assert sealed.loaded().snapshot_seq == len(NAMES) + changes


def test_one_with_embeddings_of_a_removed_version_is_not_used(sealed: World) -> None:
    sealed.add(2, "i1")
    sealed.seal()
    sealed.snapshot()
    with sealed.database.write() as connection:
        for table in ("embedding", "edge"):
            column = "version_id" if table == "embedding" else "new_id"
            connection.exec_driver_sql(f"delete from {table} where {column} = 2")
        connection.exec_driver_sql("delete from version where id = 2")
    sealed.start()
    assert sealed.loaded().gallery.items_by_version() == {"v1": len(NAMES)}


def test_few_are_known_and_they_go_with_their_gallery(sealed: World) -> None:
    with sealed.database.write() as connection:
        for n in range(MAX_RECORDED + 3):
            record_snapshot(connection, 1, f"{n:064}", len(NAMES))
        assert snapshots_of(connection, 1) == [f"{n:064}" for n in reversed(range(3, MAX_RECORDED + 3))]
        delete_gallery(connection, 1)
        record_snapshot(connection, 1, "late", len(NAMES))
        assert "late" not in snapshots_of(connection, 1)
        free_items(connection, 1, 0, 100)
        forget_gallery(connection, 1)
        assert snapshots_of(connection, 1) == []


def test_what_was_sealed_after_a_snapshot_is_in_the_next_one(sealed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEAL_ROWS", 1_000)
    sealed.write(1, *NAMES)
    sealed.snapshot()
    assert sealed.loaded().unsealed_at_snapshot == len(NAMES)
    monkeypatch.setattr(segments, "SEAL_ROWS", 4)
    sealed.seal()
    sealed.snapshot()
    read: list[int] = []
    monkeypatch.setattr("service.replica.loading.feed_of", lambda *given: (read.extend(given[2]), feed_of(*given))[1])
    sealed.start()

    assert shown(sealed.loaded()) == shown(sealed.rebuilt())
    assert read == []
    folder = sealed.loaded().folder / snapshots.FOLDER
    kept = sorted(folder.iterdir())
    sealed.snapshot()
    assert sorted(folder.iterdir()) == kept, "nothing has changed"


def test_a_load_that_fails_leaves_nothing_and_the_next_one_is_right(
    sealed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("loading.feed_of", "loading.newest", "replica.gather_changes"):
        sealed.start()
        with monkeypatch.context() as patch:
            patch.setattr(f"service.replica.{step}", _killed)
            with pytest.raises(Killed):
                sealed.loaded()
        assert sealed.replica.cache.loaded() == 0
    assert shown(sealed.loaded()) == shown(sealed.rebuilt())
    assert isinstance(sealed.replica, Replica)


def _killed(*_: object) -> None:
    raise Killed
