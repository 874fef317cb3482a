from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.store.blobs import MARKER, Blobs


@pytest.fixture(params=["file", "memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return Blobs(f"{request.param}://{tmp_path / 'blobs'}", list)


def test_what_is_written_can_be_read(blobs: Blobs) -> None:
    images = [b"a", b"", b"\x00" * 100_000, b"a"]

    keys = blobs.write(3, iter(images))

    assert [blobs.read(key) for key in keys] == images
    assert len(set(keys)) == 4
    assert all(key.startswith("3/") for key in keys)


def test_what_is_removed_is_gone_and_the_rest_stays(blobs: Blobs, caplog: pytest.LogCaptureFixture) -> None:
    kept, gone = blobs.write(1, [b"kept", b"gone"])

    blobs.remove([gone, gone, "1/never"])

    assert blobs.read(kept) == b"kept"
    with pytest.raises(FileNotFoundError):
        blobs.read(gone)
    assert not caplog.records


def test_a_gallery_is_removed_whole(blobs: Blobs, caplog: pytest.LogCaptureFixture) -> None:
    (gone,), (kept,) = blobs.write(1, [b"gone"]), blobs.write(11, [b"kept"])

    blobs.remove_gallery(1)
    blobs.remove_gallery(1)

    assert blobs.read(kept) == b"kept"
    with pytest.raises(FileNotFoundError):
        blobs.read(gone)
    assert not caplog.records


def test_nothing_to_write_is_nothing_written(tmp_path: Path) -> None:
    assert Blobs(f"file://{tmp_path}", list).write(1, []) == []
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [MARKER]


def test_a_write_that_fails_in_the_middle_leaves_no_image(tmp_path: Path) -> None:
    def images() -> Iterator[bytes]:
        yield b"first"
        raise ValueError("unreadable")

    with pytest.raises(ValueError, match="unreadable"):
        Blobs(f"file://{tmp_path}", list).write(1, images())

    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [MARKER]


def test_an_image_that_cannot_be_removed_is_told_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blobs = Blobs(f"file://{tmp_path}", list)
    (tmp_path / "1" / "folder" / "below").mkdir(parents=True)

    with caplog.at_level(logging.WARNING):
        blobs.remove(["1/folder"])

    assert "1/folder" in caplog.text


def test_new_images_are_handed_to_the_disk_before_their_folder_and_that_before_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name survives a power cut only once the folder it is in was written."""
    store = Blobs(f"file://{tmp_path / 'blobs'}", list)
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
