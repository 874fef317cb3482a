"""Any snapshot and the feed behind it are a rebuild from SQL; what is damaged or of another life is not used."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, update

from index.engines import segments
from service.replica import snapshots
from service.replica.load_progress import LoadProgress
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica
from service.store.deletion import delete_gallery, forget_gallery, free_items
from service.store.embeddings import put_embeddings
from service.store.repository import NewItem, feed_of, store_items, take_seq
from service.store.snapshots import MAX_RECORDED, record_snapshot, snapshots_of
from service.store.tables import gallery, item
from service.upgrades.tombstones import TombstonePurger
from staging.builders import make_version
from staging.crash_points import CrashPoints, Killed
from staging.replicated import ReplicatedWorld
from staging.small_shards import index_few

DIMS = {1: 2, 2: 3}
NAMES = [f"i{n}" for n in range(12)]


class World(ReplicatedWorld):
    """One gallery, written to and sealed by one process, which starts again and again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, make_version)
        self.copy = folder / "copy.db"
        self.count = 0
        self.create()
        self.write(1, *NAMES)
        self.backup()

    def live(self) -> LoadedGallery:
        return self.replica.find("g")

    def start(self) -> None:
        self.replica = self.new_replica()

    def write(self, version: int, *names: str) -> None:
        new = []
        for name in names:
            self.count += 1
            vector = np.random.default_rng(self.count).normal(size=DIMS[version])
            vector = (vector / np.linalg.norm(vector)).astype(np.float32)
            new.append(NewItem(name, {"n": self.count, "é": name}, "supplied", vector))
        with self.database.write() as connection:
            store_items(connection, 1, version, new, take_seq(connection, 1, len(new)))

    def add(self, version: int, *names: str) -> None:
        """Embeddings beside those there are."""
        with self.database.write() as connection:
            first = take_seq(connection, 1, len(names))
            for number, name in enumerate(names):
                self.count += 1
                vector = np.eye(1, DIMS[version], self.count % DIMS[version], dtype=np.float32)
                mine = item.c.external_id == name
                key = connection.execute(select(item.c.id).where(mine, item.c.deleted.is_(False))).scalar()
                if key is not None:
                    put_embeddings(connection, 1, version, "transformed", [key], vector)
                    connection.execute(update(item).where(item.c.id == key).values(seq=first + number))

    def deploy(self, version: int) -> None:
        with self.database.write() as connection:
            take_seq(connection, 1, 1)
            connection.execute(update(gallery).values(current_id=version))

    def seal(self) -> None:
        self.replica.refresh(1)
        while self.live().gallery.build_index():
            pass

    def snapshot(self) -> None:
        self.replica.refresh(1)
        self.replica.write_snapshot(self.live(), settled=True)

    def backup(self) -> None:
        with closing(sqlite3.connect(self.database_file)) as now, closing(sqlite3.connect(self.copy)) as then:
            now.backup(then)

    def restore(self) -> None:
        with closing(sqlite3.connect(self.database_file)) as now, closing(sqlite3.connect(self.copy)) as then:
            then.backup(now)
        self.start()

    @property
    def database_file(self) -> str:
        return str(self.settings.data / "regraft.db")

    def rebuilt(self) -> LoadedGallery:
        """The gallery by the database alone."""
        replica = self.new_replica()
        replica._indexes = self.settings.data / "none"
        return replica.find("g")


def told(live: LoadedGallery) -> Any:
    """All that a gallery shows: of each item what is known, and how it is found by each version."""
    queries = {"v1": np.float32([[1, 0], [0, 1], [0.6, 0.8]]), "v2": np.eye(3, dtype=np.float32)}
    found = {}
    for version in queries:
        answer = live.gallery.search(version, queries.__getitem__, 1_000, encoders=frozenset(queries), exact=True)
        scores = np.round(np.sort(answer.scores_QK, axis=1), 5).tolist()
        found[version] = [scores, {key: tuple(one) for key, one in answer.items.items()}]
    return live.seq, live.current and live.current.name, live.gallery.items_by_version(), found


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    index_few(monkeypatch, 6)
    monkeypatch.setattr(segments, "SEAL_ROWS", 4)
    monkeypatch.setattr(segments, "MERGE_FACTOR", 2)
    monkeypatch.setattr(snapshots, "SETTLED", 0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.database.close()


@pytest.fixture
def sealed(world: World) -> World:
    """All of it in segments and in one snapshot."""
    world.seal()
    world.snapshot()
    assert world.live().snapshot_seq == len(NAMES)
    return world


def test_a_start_reads_a_snapshot_and_what_came_since(sealed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed.write(2, "i1", "new")
    sealed.add(2, "i2")
    sealed.delete(1, "i3")
    sealed.deploy(2)
    monkeypatch.setattr("service.replica.replica.gallery_contents", None)
    sealed.start()
    assert told(sealed.live()) == told(sealed.rebuilt())
    assert sealed.live().snapshot_seq == len(NAMES)
    assert sealed.live().gallery.indexed_count() > 0


def test_a_snapshot_from_before_the_rows_of_deleted_items_went(sealed: World) -> None:
    sealed.delete(1, "i3", "i4")
    for _ in range(2):
        TombstonePurger(sealed.database, settle_seconds=0.0).look()
    sealed.write(1, "i3")
    sealed.start()
    assert told(sealed.live()) == told(sealed.rebuilt())
    assert sealed.live().snapshot_seq == len(NAMES)
    assert len(sealed.live().gallery.keys()) == len(NAMES) - 1


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
    world.live()
    assert [(load.gallery, load.total, load.done) for load in loads] == [("g", len(NAMES), len(NAMES))]


@pytest.mark.parametrize("harm", ["cut", "changed", "gone", "format", "emptied"])
def test_what_is_damaged_is_read_from_the_database(sealed: World, harm: str) -> None:
    (folder,) = (sealed.live().folder / snapshots.FOLDER).iterdir()
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
    assert (told(sealed.live()), sealed.live().snapshot_seq) == (told(sealed.rebuilt()), 0)
    assert not folder.exists()
    sealed.snapshot()
    sealed.start()
    assert sealed.live().snapshot_seq == len(NAMES) + 1


def test_a_snapshot_of_another_life_of_the_database_counts_for_nothing(sealed: World) -> None:
    """The database is restored, and gives the same numbers of the feed to other items."""
    sealed.backup()
    sealed.write(1, "i1", "lost")
    sealed.seal()
    sealed.snapshot()
    sealed.restore()
    sealed.write(1, "i2", "other", "third")
    sealed.start()
    assert sealed.live().snapshot_seq == len(NAMES)
    assert told(sealed.live()) == told(sealed.rebuilt())


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

    assert told(outlived.find("g")) == told(sealed.rebuilt()) == told(sealed.live())


def test_galleries_with_items_left_out_have_none(sealed: World) -> None:
    with sealed.database.write() as connection:
        connection.exec_driver_sql("delete from embedding where item_id = 2")
        connection.execute(update(item).where(item.c.id == 2).values(seq=take_seq(connection, 1, 1)))
    sealed.snapshot()
    assert sealed.live().snapshot_seq == len(NAMES)
    sealed.start()
    assert sealed.live().gallery.missing() == sealed.rebuilt().gallery.missing() == 1


def test_another_process_does_not_write_what_is_there(sealed: World) -> None:
    first, sealed.replica = sealed.replica, sealed.new_replica()
    sealed.write(1, "new")
    for replica in (first, sealed.replica):
        replica.refresh(1)
        replica.find("g").snapshot_seq = 0
        with CrashPoints(sealed.settings.indexes).watched(*AND_ROWS) as seen:
            replica.write_snapshot(replica.find("g"), settled=True)
        assert bool(seen) == (replica is first)
    assert len(list((sealed.live().folder / snapshots.FOLDER).iterdir())) == 2
    with sealed.database.lookup() as connection:
        assert len(snapshots_of(connection, 1)) == 2


def test_galleries_without_segments_have_none(world: World) -> None:
    world.snapshot()
    assert not (world.live().folder / snapshots.FOLDER).exists()


@pytest.mark.parametrize(("settled", "changes"), [(True, 4), (False, 7)])
def test_one_is_due_once_more_than_a_share_of_the_items_has_changed(
    sealed: World, monkeypatch: pytest.MonkeyPatch, settled: bool, changes: int
) -> None:
    monkeypatch.setattr(snapshots, "SETTLED", 1 / 4)
    monkeypatch.setattr(snapshots, "GROWING", 1 / 2)
    for name in NAMES[:changes]:
        assert sealed.live().snapshot_seq == len(NAMES)
        sealed.write(1, name)
        sealed.replica.refresh(1)
        sealed.replica.write_snapshot(sealed.live(), settled=settled)
    assert sealed.live().snapshot_seq == len(NAMES) + changes


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
    assert sealed.live().gallery.items_by_version() == {"v1": len(NAMES)}


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
    assert sealed.live().unsealed_at_snapshot == len(NAMES)
    monkeypatch.setattr(segments, "SEAL_ROWS", 4)
    sealed.seal()
    sealed.snapshot()
    read: list[int] = []
    monkeypatch.setattr("service.replica.replica.feed_of", lambda *given: (read.extend(given[2]), feed_of(*given))[1])
    sealed.start()

    assert told(sealed.live()) == told(sealed.rebuilt())
    assert read == []
    folder = sealed.live().folder / snapshots.FOLDER
    kept = sorted(folder.iterdir())
    sealed.snapshot()
    assert sorted(folder.iterdir()) == kept, "nothing has changed"


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
    before, seq = thrice.live().snapshot_seq, thrice.live().seq
    with CrashPoints(thrice.settings.indexes, number, torn=torn).watched(*AND_ROWS), pytest.raises(Killed):
        thrice.snapshot()
    thrice.start()
    assert told(thrice.live()) == told(thrice.rebuilt())
    named = number > POINTS.index("record_snapshot")
    assert thrice.live().snapshot_seq == (seq if named else before)
    thrice.write(1, "after")
    thrice.snapshot()
    thrice.start()
    assert thrice.live().snapshot_seq == seq + 1
    assert len(list((thrice.live().folder / snapshots.FOLDER).iterdir())) == snapshots.KEPT_FOLDERS


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
    assert told(world.live()) == told(world.rebuilt())
    world.seal()
    world.snapshot()
    world.start()
    assert told(world.live()) == told(world.rebuilt())
    world.database.close()


def test_a_load_that_fails_leaves_nothing_and_the_next_one_is_right(
    sealed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("feed_of", "newest", "gather_changes"):
        sealed.start()
        with monkeypatch.context() as patch:
            patch.setattr(f"service.replica.replica.{step}", _killed)
            with pytest.raises(Killed):
                sealed.live()
        assert sealed.replica.cache.loaded() == 0
    assert told(sealed.live()) == told(sealed.rebuilt())
    assert isinstance(sealed.replica, Replica)


def _killed(*_: object) -> None:
    raise Killed
