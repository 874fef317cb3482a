"""Vectors that lie in files: random writes and a process killed at every point of moving them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select

from index.space import Vectors
from service.registry.version_records import insert_version
from service.settings import Settings
from service.store import offloader, offloading, sql_time
from service.store.blob_references import open_blobs
from service.store.blobs import Blobs, StoreUnreachable
from service.store.database import Database
from service.store.deletion import delete_gallery, forget_gallery, free_items
from service.store.embeddings import embeddings_by_id, put_embeddings, vectors_of
from service.store.job_leases import acquire_job
from service.store.migration import upgrade
from service.store.offloader import Offloader
from service.store.repository import NewItem, changes, delete_items, insert_gallery, rows_of, store_items, take_seq
from service.store.tables import embedding
from service.store.vector_files import IS_IN_DATABASE, drop_file, files
from service.store.vector_parquet import NoParquet
from staging.builders import make_version
from staging.settling import settled_at_once

DIM = 3
V1, V2 = 1, 2
GALLERIES = ("g", "h")
IDS = [f"i{n}" for n in range(40)]


class Killed(BaseException):
    """Nothing after it is done: as kill -9 leaves the database and the store."""


class Site:
    """A database with its image store, a plain model of what both hold, and whoever moves vectors."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.database = Database(settings.database_url)
        self.blobs = open_blobs(self.database, settings.blobs_url)
        # (gallery, id) -> version -> bytes.
        self.held: dict[tuple[int, str], dict[int, bytes]] = {}

    def mover(self, store: Any = "objects") -> Offloader:
        """A process that has just started."""
        return Offloader(self.database, self.blobs, store)

    def fill(self) -> None:
        """A gallery of all ids with random vectors: the first one, so its key is 1."""
        with self.database.write() as connection:
            insert_gallery(connection, "g")
        self.write(1, IDS, np.random.default_rng(0).normal(size=(len(IDS), DIM)).astype(np.float32))

    def write(self, gallery: int, ids: list[str], vectors: Vectors) -> None:
        with self.database.write() as connection:
            new = [NewItem(one, {}, "supplied", vector) for one, vector in zip(ids, vectors, strict=True)]
            store_items(connection, gallery, V1, new, take_seq(connection, gallery, len(new)))
        self.held |= {(gallery, one): {V1: row.tobytes()} for one, row in zip(ids, vectors, strict=True)}

    def add(self, gallery: int, ids: list[str], vectors: Vectors) -> None:
        """Embeddings by the second version, as a backfill writes them."""
        there = [one for one in ids if (gallery, one) in self.held]
        with self.database.write() as connection:
            take_seq(connection, gallery, 1)
            keys = {row.external_id: row.id for row in rows_of(connection, gallery, there)}
            put_embeddings(connection, gallery, V2, "transformed", [keys[one] for one in there], vectors[: len(there)])
        for one, row in zip(there, vectors, strict=False):
            self.held[gallery, one][V2] = row.tobytes()

    def delete(self, gallery: int, ids: list[str], _: Vectors) -> None:
        with self.database.write() as connection:
            delete_items(connection, gallery, ids)
        for one in ids:
            self.held.pop((gallery, one), None)

    def check(self, galleries: list[int]) -> None:
        """Every vector is there, bit by bit, whichever way it is read."""
        with self.database.read() as connection:
            for gallery in galleries:
                wanted = {one: held for (of, one), held in self.held.items() if of == gallery}
                fed: dict[str, dict[int, bytes]] = {}
                for block in changes(connection, gallery, 0):
                    for _, version, _, vector, _, one, *_ in block:
                        fed.setdefault(one, {})[version] = vector  # type: ignore[index,assignment]
                assert fed == wanted
                found = embeddings_by_id(connection, gallery, IDS)
                assert {one: {row.version_id: row.vector for row in rows} for one, rows in found.items()} == wanted
                keys = {row.id: row.external_id for row in rows_of(connection, gallery, list(wanted))}
                stored = vectors_of(connection, gallery, list(keys))
                assert {keys[key]: {v: row for v, (_, row) in held.items()} for key, held in stored.items()} == wanted

    def far(self) -> int:
        """Vectors that the database does not hold itself."""
        with self.database.lookup() as connection:
            return int(
                connection.execute(select(func.count()).select_from(embedding).where(~IS_IN_DATABASE)).scalar_one()
            )

    def there(self) -> dict[str, str]:
        """Key -> state of each file that has a row."""
        with self.database.lookup() as connection:
            return {file.key: file.state for file in files(connection)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A few vectors are a file, everything has settled, and nothing waits."""
    settled_at_once(monkeypatch, FILE_ROWS=16, SCANNED=12, BLOCK=5)
    settled_at_once(monkeypatch, LEAST_ROWS=4, COUNTED_SECONDS=0.0, LEASE_SECONDS=0.0, PAUSE_SECONDS=0.0)
    monkeypatch.setattr("service.store.vector_reader.GROUP", 4)
    monkeypatch.setattr("service.store.vector_parquet.GROUP", 4)
    return monkeypatch


@pytest.fixture
def site(settings: Settings, tmp_path: Path) -> Iterator[Site]:
    upgrade(settings)
    made = Site(settings)
    with closing(made.database):
        with made.database.write() as connection:
            for name in ("v1", "v2"):
                insert_version(connection, make_version(tmp_path / name, name, DIM, encoder=False), [])
        yield made


def before(*_: object) -> None:
    raise Killed


def killed_in(patch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> None:
    work: Callable[..., Any] = getattr(owner, name)

    def dying(*args: Any, **named: Any) -> Any:
        if after:
            work(*args, **named)
        raise Killed

    patch.setattr(owner, name, dying)


def written_meanwhile(patch: pytest.MonkeyPatch, owner: Any, name: str, write: Callable[[], None]) -> None:
    """Have others write once that is done, before what was read for it is used."""
    work: Callable[..., Any] = getattr(owner, name)

    def interrupted(*args: Any, **named: Any) -> Any:
        done = work(*args, **named)
        patch.setattr(owner, name, work)
        write()
        return done

    patch.setattr(owner, name, interrupted)


READ = [(offloading, "read_from_database"), (Blobs, "put"), (offloading, "read_vectors")]
POINTS = [
    (offloading, "begin_file", False),
    (Blobs, "put", False),  # its row is there, and it is not
    (Blobs, "put", True),  # it is there, and no row speaks of it
    (offloading, "_put_places", True),  # within the transaction that takes vectors out
    (offloader, "set_counted", True),  # rows speak of it, and are counted
    (offloading, "_put_vectors", True),
    (offloading, "drop_file", True),
    (Blobs, "remove", False),  # before the sweep of a file, and behind it
    (Blobs, "remove", True),
    (offloading, "forget_file", True),
]


@pytest.mark.parametrize(
    ("seed", "steps"), [(1, 12), *(pytest.param(seed, 80, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_every_vector_is_there_bit_by_bit_whatever_is_written_and_killed(
    site: Site, small: pytest.MonkeyPatch, seed: int, steps: int
) -> None:
    random, numbers = Random(seed), np.random.default_rng(seed)
    with site.database.write() as connection:
        galleries = [insert_gallery(connection, name) for name in GALLERIES]
    mover, most = site.mover(), 0

    def write() -> None:
        gallery, ids = random.choice(galleries), random.sample(IDS, random.randint(1, 20))
        vectors = numbers.normal(size=(len(ids), DIM)).astype(np.float32)
        random.choice((site.write, site.write, site.add, site.delete))(gallery, ids, vectors)

    for _ in range(steps):
        write()
        with pytest.MonkeyPatch.context() as patch:
            written_meanwhile(patch, *random.choice(READ), write)
            for _ in range(random.randint(0, 2)):
                mover.look()
        if random.random() < 0.5:
            owner, name, after = random.choice(POINTS)
            with pytest.MonkeyPatch.context() as patch:
                killed_in(patch, owner, name, after=after)
                try:
                    mover.look()
                except Killed:
                    mover = site.mover(random.choice(("objects", "objects", "sql")))
        if random.random() < 0.3:
            site.check(galleries)
        most = max(most, site.far())
    site.check(galleries)
    assert most >= 12

    for _ in range(3):  # what was left over is swept, and nothing else
        site.mover().look()
    assert set(site.there().values()) == {"kept"}
    assert {key for key, _ in site.blobs.all_vector_files()} == set(site.there())
    site.check(galleries)

    mover = site.mover("sql")
    for _ in range(2):
        mover.look()
    assert (site.far(), site.there(), list(site.blobs.all_vector_files())) == (0, {}, [])
    site.check(galleries)


@pytest.fixture
def moved(site: Site, small: pytest.MonkeyPatch) -> Site:
    """Forty vectors in three files, sixteen at most in each."""
    site.fill()
    site.mover().look()
    assert (site.far(), len(site.there())) == (40, 3)
    return site


def test_who_lost_the_lease_while_he_wrote_a_file_moves_nothing_twice(site: Site, small: pytest.MonkeyPatch) -> None:
    site.fill()
    put, other = Blobs.put, site.mover()

    def while_another_moves(self: Blobs, key: str, content: bytes) -> None:
        small.setattr(Blobs, "put", put)
        put(self, key, content)
        other.look()

    small.setattr(Blobs, "put", while_another_moves)
    site.mover().look()
    site.check([1])
    site.mover().look()
    assert list(site.there().values()) == ["kept"] * 3
    assert site.far() == 40


def test_an_upload_that_takes_longer_than_the_lease_is_dropped_by_nobody(site: Site, small: pytest.MonkeyPatch) -> None:
    small.setattr(offloader, "LEASE_SECONDS", 0.8)
    site.fill()
    put, other = Blobs.put, site.mover()

    def slow_put(self: Blobs, key: str, content: bytes) -> None:
        put(self, key, content)
        time.sleep(1.2)
        with small.context() as patch:
            patch.setattr(Blobs, "put", put)
            other.look()

    small.setattr(Blobs, "put", slow_put)
    site.mover().look()

    assert list(site.there().values()) == ["kept"] * 3
    assert site.far() == 40


@pytest.mark.parametrize(
    ("yes", "states", "far"), [(0, [], 0), (1, ["writing"], 0), (2, ["kept"], 5), (3, ["kept"], 10)]
)
def test_who_may_not_go_on_uploads_nothing_more_and_moves_no_further_block(
    site: Site, small: pytest.MonkeyPatch, yes: int, states: list[str], far: int
) -> None:
    site.fill()
    with site.database.read() as connection:
        found = rows_of(connection, 1, IDS)
    answers = [True] * yes

    offloading.offload(
        site.database,
        site.blobs,
        (1, V1),
        [row.id for row in found][:16],
        max(row.seq for row in found),
        4,
        lambda: bool(answers) and answers.pop(),
    )

    assert (list(site.there().values()), site.far()) == (states, far)
    site.check([1])


def test_a_file_that_rows_came_to_speak_of_while_another_process_looked_for_lost_ones_stays(
    site: Site, small: pytest.MonkeyPatch
) -> None:
    site.fill()
    put, look = Blobs.put, files
    seen, moved = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        found = look(*args)
        seen.set()
        moved.wait(60)
        return found

    other = threading.Thread(target=lambda: offloading.sweep(site.database, site.blobs))

    def while_another_looks(self: Blobs, key: str, content: bytes) -> None:
        small.setattr(Blobs, "put", put)
        put(self, key, content)
        small.setattr(offloading, "files", slow)
        other.start()
        seen.wait(60)
        small.setattr(offloading, "files", look)

    small.setattr(Blobs, "put", while_another_looks)
    site.mover().look()
    moved.set()
    other.join()
    assert list(site.there().values()) == ["kept"] * 3
    site.check([1])


def test_one_process_moves_vectors(site: Site, small: pytest.MonkeyPatch) -> None:
    small.setattr(offloader, "LEASE_SECONDS", 60.0)
    with site.database.write() as connection:
        insert_gallery(connection, "g")
    first, second = site.mover(), site.mover()
    first.look()
    site.write(1, IDS, np.ones((len(IDS), DIM), np.float32))
    for _ in range(2):
        second.look()
    assert site.far() == 0
    for _ in range(2):  # what was there at the look before has settled
        first.look()
    assert site.far() == 40


def test_vectors_that_could_not_be_moved_for_want_of_the_lease_are_moved_once_it_is_back(
    site: Site, small: pytest.MonkeyPatch
) -> None:
    site.fill()
    mover, answers = site.mover(), [True, True, False]
    small.setattr(offloader, "acquire_job", lambda *given: answers.pop(0) if answers else acquire_job(*given))
    for _ in range(2):
        mover.look()
    assert site.far() == 40


def test_a_file_holds_vectors_of_one_version(moved: Site) -> None:
    moved.write(1, IDS[:20], np.ones((20, DIM), np.float32))
    moved.add(1, IDS, np.full((len(IDS), DIM), 2, np.float32))
    moved.mover().look()
    with moved.database.lookup() as connection:
        assert max(file.rows for file in files(connection)) == 16
    moved.check([1])


@pytest.mark.parametrize(("step", "store"), [((Blobs, "put"), "objects"), ((offloading, "read_vectors"), "sql")])
def test_what_is_written_while_it_is_moved_stays_as_it_was_written(
    moved: Site, small: pytest.MonkeyPatch, step: tuple[Any, str], store: str
) -> None:
    numbers = np.random.default_rng(1)

    def write() -> None:
        moved.write(1, IDS, numbers.normal(size=(len(IDS), DIM)).astype(np.float32))

    if store == "objects":
        write()
    written_meanwhile(small, *step, write)
    mover = moved.mover(store)
    mover.look()
    moved.check([1])


@pytest.mark.parametrize("harmed", [False, True])
def test_what_is_left_of_a_file_is_moved_on_with_others_but_for_what_is_damaged(
    site: Site, small: pytest.MonkeyPatch, harmed: bool
) -> None:
    site.fill()
    mover = site.mover()
    mover.look()
    first, *_ = site.there()
    if harmed:
        path = site.settings.data / "blobs" / first
        content = path.read_bytes()
        path.write_bytes(content.replace(site.held[1, "i12"][V1], b"\0" * 4 * DIM))
    site.write(1, IDS[:10], np.ones((10, DIM), np.float32))
    for _ in range(3):
        mover.look()
    assert (site.far(), site.there().get(first)) == (40, "kept" if harmed else None)
    if not harmed:
        site.check([1])


def test_a_deleted_gallery_takes_its_files_along_once_nobody_can_ask_for_them(
    moved: Site, small: pytest.MonkeyPatch
) -> None:
    small.setattr(offloading, "GRACE_SECONDS", 60.0)
    with moved.database.write() as connection:
        delete_gallery(connection, 1)
        free_items(connection, 1, 0, 1000)
        forget_gallery(connection, 1)
    for mover in (moved.mover(), moved.mover("sql")):
        mover.look()
        assert list(moved.there().values()) == ["dropped"] * 3
    assert len(list(moved.blobs.all_vector_files())) == 3
    small.setattr(offloading, "GRACE_SECONDS", 0.0)
    moved.mover("sql").look()
    assert (moved.there(), list(moved.blobs.all_vector_files())) == ({}, [])


def test_a_process_whose_clock_is_ahead_removes_no_file_early(moved: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "GRACE_SECONDS", 3600.0)
    with moved.database.write() as connection:
        delete_gallery(connection, 1)
        free_items(connection, 1, 0, 1000)
        forget_gallery(connection, 1)
    moved.mover().look()
    of_database = time.time
    monkeypatch.setattr(sql_time, "time", SimpleNamespace(time=of_database))
    monkeypatch.setattr(time, "time", lambda: of_database() + 7200.0)

    moved.mover().look()

    assert list(moved.there().values()) == ["dropped"] * 3
    assert len(list(moved.blobs.all_vector_files())) == 3


@pytest.mark.parametrize("harm", ["gone", "cut", "changed", "another file"])
def test_damage_of_a_file_stays_where_it_is(moved: Site, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    first, second, _ = moved.there()
    path = moved.settings.data / "blobs" / first
    content = path.read_bytes()
    wanted = {one: held[V1] for (_, one), held in moved.held.items()}
    vector = content.index(wanted["i5"])
    changed = content[:vector] + b"\0" + content[vector + 1 :]
    other = (path.parents[2] / second).read_bytes()
    path.write_bytes({"gone": b"", "cut": content[:-100], "changed": changed, "another file": other}[harm])
    if harm == "gone":
        path.unlink()

    fresh = Site(moved.settings)  # which has read nothing yet
    lost = {f"i{n}" for n in (range(4, 8) if harm == "changed" else range(16))}
    with closing(fresh.database):
        with fresh.database.read() as connection:
            read = {row[5]: row[3] for block in changes(connection, 1, 0) for row in block}
        assert read == {one: b"" if one in lost else vector for one, vector in wanted.items()}
        mover = fresh.mover("sql")  # brings home what there is
        for _ in range(2):
            mover.look()
    assert moved.far() == len(lost)
    assert moved.there() == {first: "kept"}
    assert [f"items={len(lost)}" in line for line in caplog.messages if "not_brought_home" in line] == [True]


def test_where_the_store_is_away_nothing_is_said_of_vectors_no_file_is_forgotten_and_writes_go_on(moved: Site) -> None:
    there, elsewhere = moved.settings.data / "blobs", moved.settings.data / "elsewhere"
    moved.write(1, IDS[:16], np.ones((16, DIM), np.float32))
    with moved.database.write() as connection:
        drop_file(connection, 1)
    fresh = Site(moved.settings)
    there.rename(elsewhere)
    there.mkdir()  # as a disk that is not mounted leaves it
    with closing(fresh.database):
        with fresh.database.read() as connection, pytest.raises(StoreUnreachable):
            list(changes(connection, 1, 0))
        moved.write(1, IDS[16:24], np.ones((8, DIM), np.float32))
        for store in ("objects", "sql"):
            with pytest.raises(StoreUnreachable):
                fresh.mover(store).look()
        assert (moved.far(), len(moved.there())) == (16, 3)
        there.rmdir()
        elsewhere.rename(there)
        fresh.held = moved.held
        fresh.check([1])


def test_without_pyarrow_vectors_stay_and_those_that_lie_in_files_are_asked_for_in_vain(
    moved: Site, small: pytest.MonkeyPatch
) -> None:
    small.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(NoParquet, match=r"regraft\[arrow\]"):
        moved.mover()
    moved.mover("sql")
    with moved.database.read() as connection, pytest.raises(NoParquet):
        list(changes(connection, 1, 0))
