"""Files of vectors: what they hold, when they go, and what is read where one is damaged or the store is away."""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.store.galleries.change_feed import changes
from service.store.galleries.deletion import delete_gallery, forget_gallery, free_items
from service.store.image_store.blobs import Blobs, StoreUnreachable
from service.store.offloading import moves
from service.store.sql import database_clock
from service.store.vectors.files import drop_file, files
from service.store.vectors.parquet import NoParquet
from staging.states.vector_site import DIM, IDS, V1, Site, written_meanwhile


def test_a_file_holds_vectors_of_one_version(moved: Site) -> None:
    moved.write(1, IDS[:20], np.ones((20, DIM), np.float32))
    moved.add(1, IDS, np.full((len(IDS), DIM), 2, np.float32))
    moved.mover().look()
    with moved.database.lookup() as connection:
        assert max(file.rows for file in files(connection)) == 16
    moved.check([1])


@pytest.mark.parametrize(("step", "store"), [((Blobs, "put"), "objects"), ((moves, "read_vectors"), "sql")])
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


@pytest.mark.parametrize("how", ["stopped", "killed", "the store is away"])
def test_a_file_whose_mover_ends_while_it_is_emptied_goes_though_nobody_writes_any_more(
    moved: Site, small: pytest.MonkeyPatch, how: str
) -> None:
    first, *_ = moved.there()
    moved.write(1, IDS[:10], np.ones((10, DIM), np.float32))
    mover, put = moved.mover(), moves._put_vectors

    def end(*given: Any) -> None:
        put(*given)
        if how == "stopped":
            mover.stop()
        else:
            raise KeyboardInterrupt if how == "killed" else StoreUnreachable

    with small.context() as patch, suppress(KeyboardInterrupt, StoreUnreachable):
        patch.setattr(moves, "_put_vectors", end)
        mover.look()
    assert moved.there()[first] == "kept"
    for _ in range(3):
        moved.mover().look()
    assert (moved.far(), moved.there().get(first)) == (40, None)
    moved.check([1])


def test_a_deleted_gallery_takes_its_files_along_once_nobody_can_ask_for_them(
    moved: Site, small: pytest.MonkeyPatch
) -> None:
    small.setattr(moves, "GRACE_SECONDS", 60.0)
    with moved.database.write() as connection:
        delete_gallery(connection, 1)
        free_items(connection, 1, 0, 1000)
        forget_gallery(connection, 1)
    for mover in (moved.mover(), moved.mover("sql")):
        mover.look()
        assert list(moved.there().values()) == ["dropped"] * 3
    assert len(list(moved.blobs.all_vector_files())) == 3
    small.setattr(moves, "GRACE_SECONDS", 0.0)
    moved.mover("sql").look()
    assert (moved.there(), list(moved.blobs.all_vector_files())) == ({}, [])


def test_a_process_whose_clock_is_ahead_removes_no_file_early(moved: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "GRACE_SECONDS", 3600.0)
    with moved.database.write() as connection:
        delete_gallery(connection, 1)
        free_items(connection, 1, 0, 1000)
        forget_gallery(connection, 1)
    moved.mover().look()
    of_database = time.time
    monkeypatch.setattr(database_clock, "time", SimpleNamespace(time=of_database))
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
