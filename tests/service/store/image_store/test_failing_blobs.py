"""`Blobs` where a write or removal fails, on a full disk, and in a power cut."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.errors import StorageFull
from service.store.image_store.blobs import MARKER, Blobs, StoreUnreachable


@pytest.mark.parametrize("blobs", ["s3", "memory"], indirect=True)
def test_a_write_of_many_that_fails_leaves_no_image(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Blobs._put

    def failing(self: Blobs, key: str, content: bytes) -> None:
        if content == b"13":
            raise OSError("connection reset")
        put(self, key, content)

    monkeypatch.setattr(Blobs, "_put", failing)
    with pytest.raises(StoreUnreachable, match="connection reset"):
        blobs.write(1, [str(n).encode() for n in range(40)])

    assert list(blobs.all()) == []


def test_a_write_that_fails_in_the_middle_leaves_no_image(tmp_path: Path) -> None:
    def images() -> Iterator[bytes]:
        yield b"first"
        raise ValueError("unreadable")

    with pytest.raises(ValueError, match="unreadable"):
        Blobs(f"file://{tmp_path}", list, str).write(1, images())

    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [MARKER]


def test_a_full_store_is_a_problem_until_what_was_refused_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, room = Blobs(f"file://{tmp_path}", list, str), 100
    write = blobs._store.pipe_file

    def with_room(path: str, content: bytes) -> None:
        if len(content) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(blobs._store, "pipe_file", with_room)
    with pytest.raises(StorageFull):
        blobs.put("vectors/1/1-x.parquet", bytes(5000))
    blobs.check_again()
    assert "is full" in str(blobs.problem)

    room = 5000
    blobs.check_again()
    assert blobs.problem is None
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [MARKER]


def test_a_store_that_is_read_and_takes_nothing_is_a_problem_until_it_does(tmp_path: Path) -> None:
    blobs = Blobs(f"file://{tmp_path}", list, str)
    (first,) = blobs.write(1, [b"first"])
    (tmp_path / "2").touch()  # where the folder of a gallery would be, as what may not be written is for root, too

    with pytest.raises(StoreUnreachable):
        blobs.write(2, [b"second"])
    assert blobs.read(first) == b"first"
    assert "cannot be written" in str(blobs.problem)

    (tmp_path / "2").unlink()
    blobs.write(2, [b"second"])
    assert blobs.problem is None


def test_an_image_that_cannot_be_removed_is_told_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blobs = Blobs(f"file://{tmp_path}", list, str)
    (tmp_path / "1" / "folder" / "below").mkdir(parents=True)

    with caplog.at_level(logging.WARNING):
        left = blobs.remove(["1/folder", "1/never"])

    assert left == ["1/folder"]
    assert "1/folder" in caplog.text


def test_new_images_are_handed_to_the_disk_before_their_folder_and_that_before_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name survives a power cut only once the folder it is in was written."""
    store = Blobs(f"file://{tmp_path / 'blobs'}", list, str)
    store.check()
    opened: dict[int, Path] = {}
    synced: list[Path] = []
    real_open, real_sync = os.open, os.fsync

    def opening(path: Any, *rest: Any, **more: Any) -> int:
        handle = real_open(path, *rest, **more)
        opened[handle] = Path(path)
        return handle

    def syncing(handle: int) -> None:
        real_sync(handle)
        synced.append(opened[handle])

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "fsync", syncing)
    keys = store.write(7, [b"one", b"two"])

    places = [tmp_path / "blobs" / key for key in keys]
    assert set(synced[:2]) == set(places)
    assert set(synced[2:]) == {tmp_path / "blobs" / "7", tmp_path / "blobs"}
