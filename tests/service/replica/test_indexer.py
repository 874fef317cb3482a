"""Who seals what: of the processes that have a gallery in memory one at a time; the others take over what it built."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sqlalchemy import delete, insert
from sqlalchemy.exc import OperationalError

from index.engines.config import IndexConfig, IndexKind
from index.engines.memory import segment, segments
from index.engines.memory.approximate import Approximate
from index.engines.memory.snapshot import SegmentFiles
from index.gallery import Gallery
from index.metadata.filter import parse_filter
from service.registry.version_records import insert_version
from service.replica import indexer
from service.replica.index_files import locked
from service.replica.indexer import Indexer
from service.replica.replica import Replica
from service.store.galleries.deletion import delete_gallery
from service.store.tables import deployment, embedding, version
from staging.inputs.builders import make_version
from staging.states.replicated import ReplicatedWorld as World
from staging.states.small_shards import index_few
from staging.waiting import until

ROWS = 40


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Galleries "a", "b" and "c", each with rows to seal."""
    index_few(monkeypatch, 10)
    monkeypatch.setattr(segments, "SEAL_ROWS", 10)
    monkeypatch.setattr(indexer, "PAUSE_SECONDS", 0.01)
    made = World(tmp_path, make_version)
    for name in "abc":
        angles = np.linspace(0, 3, ROWS)
        made.store(made.create(name), 1, **{f"i{n}": [np.cos(angle), np.sin(angle)] for n, angle in enumerate(angles)})
    yield made
    made.database.close()


def indexed(replica: Replica, name: str) -> bool:
    return replica.find(name).gallery.indexed_count() == ROWS


def test_what_only_one_process_has_loaded_is_sealed_by_it(world: World) -> None:
    first, second = world.new_replica(), world.new_replica()
    indexers = [Indexer(replica) for replica in (first, second)]
    for replica, name in ((first, "a"), (second, "b"), (first, "c"), (second, "c")):
        replica.find(name)
    for one in indexers:
        one.start()
    try:
        until(lambda: indexed(first, "a") and indexed(second, "b"))
        until(lambda: indexed(first, "c") and indexed(second, "c"))
    finally:
        for one in indexers:
            one.stop()
    c = first.find("c")
    assert len(list(c.folder.glob("[!.]*/*/*"))) == 1, "one built it, and the other has it from there"
    assert c.gallery.items_by_version() == second.find("c").gallery.items_by_version() == {"v1": ROWS}


def test_what_another_process_dies_over_is_built_though_nobody_writes_any_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It builds for a minute, and is killed."""
    now = [0.0]
    monkeypatch.setattr(indexer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    replica = world.new_replica()
    one = Indexer(replica)
    with locked(replica.find("a").folder):
        for now[0] in range(60):
            one._round()
    assert not indexed(replica, "a")
    one._round()
    assert indexed(replica, "a")


@pytest.mark.parametrize("told", [True, False])
def test_a_gallery_deleted_while_nobody_has_it_in_memory_takes_its_files_along(
    world: World, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Also where another machine deletes it."""
    now = [0.0]
    monkeypatch.setattr(indexer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    replica = world.new_replica()
    loaded = replica.find("a")
    Indexer(replica)._round()
    number, folder = loaded.id, loaded.folder
    assert folder.exists()

    replica = world.new_replica()
    one = Indexer(replica)
    one._round()
    assert folder.exists(), "nobody has asked for it since this start"
    with world.database.write() as connection:
        delete_gallery(connection, number)
    if told:
        replica.forget(number)
    else:
        now[0] += 600
    one._round()
    assert not folder.exists()


@pytest.mark.parametrize("gone", ["retired", "deleted"])
@pytest.mark.parametrize("needed", ["", "held", "locked", "in memory"])
def test_a_version_that_is_freed_while_nobody_has_its_gallery_in_memory_takes_its_files_along(
    world: World, monkeypatch: pytest.MonkeyPatch, gone: str, needed: str
) -> None:
    """Unless items hold it again, another process builds the gallery, or it is in memory by then."""
    now = [0.0]
    monkeypatch.setattr(indexer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    third = make_version(world.settings.versions / "v3", "v3", 2)
    with world.database.write() as connection:
        insert_version(connection, third, [])
    replica = world.new_replica()
    replica.find("a")
    world.store(number := replica.find("a").id, 3, **{f"j{n}": [np.sin(n), np.cos(n)] for n in range(ROWS)})
    replica.refresh(number)
    Indexer(replica)._round()
    folder = replica.find("a").folder

    replica = world.new_replica()
    one = Indexer(replica)
    one._round()
    assert {path.name for path in folder.glob("[!.]*")} == {"v1", "v3"}
    if needed == "in memory":
        monkeypatch.setattr(Indexer, "_index_gallery", lambda *_: None)
        replica.find("a")
    with world.database.write() as connection:
        if needed != "held":
            connection.execute(delete(embedding).where(embedding.c.version_id == 3))
        if gone == "retired":
            retired = {"gallery_id": number, "version_id": 3, "state": "retired", "activated": 0, "created": 0.0}
            connection.execute(insert(deployment).values(retired))
        elif needed != "held":
            connection.execute(delete(version).where(version.c.id == 3))
    now[0] += 600
    with locked(folder) if needed == "locked" else nullcontext():
        one._round()
    assert {path.name for path in folder.glob("[!.]*")} == {"v1", *(["v3"] if needed else [])}


def test_while_the_database_is_away_it_says_so_once_and_then_it_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica, looks = world.new_replica(), Counter[str]()

    def away(name: str) -> Callable[..., None]:
        def fail(*_: object) -> None:
            looks[name] += 1
            raise OperationalError("SELECT 1", {}, ConnectionError("gone"))

        return fail

    replica.find("a")
    indexer_of = Indexer(replica)
    try:
        with monkeypatch.context() as cut:
            for name in ("sweep_indexes", "refresh"):
                cut.setattr(replica, name, away(name))
            indexer_of.start()
            until(lambda: min(looks["sweep_indexes"], looks["refresh"]) > 3)
        until(lambda: indexed(replica, "a"))
    finally:
        indexer_of.stop()

    said = Counter(str(record.msg) for record in caplog.records if record.levelname == "ERROR")
    assert said == {"action=indexes_not_swept": 1, "action=index_failed gallery=a": 1}


def test_what_cannot_be_measured_is_indexed_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = world.new_replica()
    replica.find("a")

    def fail(_: Gallery) -> int:
        raise MemoryError

    monkeypatch.setattr(Gallery, "bytes", fail)
    one = Indexer(replica)
    one.start()
    try:
        until(lambda: indexed(replica, "a"))
    finally:
        one.stop()
    said = [str(record.msg) for record in caplog.records if record.levelname == "ERROR"]
    assert said == ["action=memory_not_measured"]


@pytest.mark.parametrize("step", [(SegmentFiles, "_write"), (Approximate, "write")])
def test_a_gallery_that_is_deleted_while_its_index_is_written_is_left_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: tuple[type, str]
) -> None:
    replica, keep, write = world.new_replica(), SegmentFiles.keep, getattr(*step)
    failed: list[OSError] = []

    def write_one_that_goes(*given: object) -> None:
        with world.database.write() as connection:
            delete_gallery(connection, loaded.id)
        replica.sweep_indexes()
        write(*given)

    def keep_it(files: SegmentFiles, made: segment.Segment) -> segment.Segment:
        try:
            return keep(files, made)
        except OSError as error:
            failed.append(error)
            raise

    monkeypatch.setattr(*step, write_one_that_goes)
    monkeypatch.setattr(SegmentFiles, "keep", keep_it)
    loaded = replica.find("a")
    loaded.gallery.configure(IndexConfig(kind=IndexKind.HNSW))
    one = Indexer(replica)
    one.start()
    try:
        until(lambda: not replica.all())
    finally:
        one.stop()
    assert len(failed) == 1
    assert [record.msg for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_start_finds_a_snapshot_also_where_more_is_to_be_built(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    built = iter([True, True, False])
    monkeypatch.setattr(Gallery, "build_index", lambda *_: (done.append("built"), next(built, False))[1])
    monkeypatch.setattr(Replica, "write_snapshot", lambda *_, settled: done.append("settled" if settled else "kept"))
    replica = world.new_replica()
    replica.find("a")
    one = Indexer(replica)
    one.start()
    try:
        until(lambda: len(done) >= 6)
    finally:
        one.stop()
    assert done[:6] == ["built", "kept", "built", "kept", "built", "kept"]


def test_what_indexes_and_filters_add_makes_room_and_what_is_unloaded_is_let_go(world: World) -> None:
    """While nobody writes, and though the indexer has looked at all of them."""
    replica = world.new_replica()
    for name in "ab":
        replica.find(name)
    one = Indexer(replica)
    one.start()
    try:
        until(lambda: indexed(replica, "a") and indexed(replica, "b"))
        until(lambda: replica.cache.bytes() == sum(loaded.gallery.bytes() for loaded in replica.all()))
        replica.cache.limit = replica.cache.bytes()
        some = parse_filter({"field": "label", "eq": "cat"})
        replica.find("b").gallery.search("v1", lambda _: np.array([[1, 0]], np.float32), 1, filter=some)
        until(lambda: [loaded.name for loaded in replica.all()] == ["b"])
    finally:
        one.stop()


def test_a_build_that_cannot_be_written_is_not_repeated_without_a_pause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: a build that took ten seconds is repeated after ninety, though nothing is written meanwhile."""
    now, tried, keep = [0.0], Counter[str](), SegmentFiles.keep
    monkeypatch.setattr(indexer, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def fail(*_: object) -> segment.Segment:
        tried["full"] += 1
        now[0] += 10
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SegmentFiles, "keep", fail)
    replica = world.new_replica()
    one = Indexer(replica)
    replica.find("a")
    for now[0] in (0.0, *range(11, 100)):
        one._round()
    assert tried["full"] == 1, "from 10 to 100"

    monkeypatch.setattr(SegmentFiles, "keep", keep)
    now[0] = 101
    one._round()
    assert indexed(replica, "a")
