"""`Blobs`: what is written is read, listed and removed, in a folder, in memory and on an S3."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.store.image_store import blobs as store_of_blobs
from service.store.image_store.blobs import MARKER, MAX_PARALLEL, Blobs


def test_what_is_written_can_be_read(blobs: Blobs) -> None:
    images = [b"a", b"", b"\x00" * 100_000, b"a"]

    keys = blobs.write(3, iter(images))

    assert [blobs.read(key) for key in keys] == images
    assert len(set(keys)) == 4
    assert all(key.startswith("3/") for key in keys)


def test_many_are_fetched_in_order_and_one_that_is_gone_is_none(blobs: Blobs) -> None:
    images = [b"%d" % n for n in range(2 * MAX_PARALLEL)]
    keys = blobs.write(1, images)
    blobs.remove([keys[3]])

    assert list(blobs.fetch_all(keys)) == [None if n == 3 else image for n, image in enumerate(images)]
    assert list(blobs.fetch_all([])) == []
    reads = list(blobs.read_all(keys))
    assert [read() for n, read in enumerate(reads) if n != 3] == [*images[:3], *images[4:]]
    with pytest.raises(FileNotFoundError):
        reads[3]()


def test_many_at_once_keep_their_order(blobs: Blobs) -> None:
    images = [str(n).encode() for n in range(3 * MAX_PARALLEL)]

    keys = blobs.write(1, iter(images))

    assert [blobs.read(key) for key in keys] == images


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


def test_everything_there_is_is_listed_with_its_age(blobs: Blobs) -> None:
    assert list(blobs.all()) == []
    keys = blobs.write(1, [b"a", b"b"]) + blobs.write(2, [b"c"])

    found = dict(blobs.all())

    assert sorted(found) == sorted(keys)
    assert all(0 <= age < 600 for age in found.values())
    assert [blobs.exists(key) for key in (*keys, "1/never")] == [True, True, True, False]
    blobs.remove(keys)
    assert list(blobs.all()) == []


def test_an_age_is_by_the_clock_of_the_store(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = blobs.write(1, [b"a"])
    here = time.time
    monkeypatch.setattr(store_of_blobs, "time", SimpleNamespace(time=lambda: here() + 7200))

    assert [key for key, age in blobs.all() if age < 600] == keys


def test_what_is_in_a_store_that_takes_no_writes_is_listed_with_its_age(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = blobs.write(1, [b"a"])
    monkeypatch.setattr(blobs, "_put", refused)

    assert [key for key, age in blobs.all() if age < 600] == keys


def refused(*_: object) -> None:
    raise PermissionError("read-only")


def test_files_of_others_are_not_told_of(blobs: Blobs) -> None:
    (key,) = blobs.write(1, [b"a"])
    ours = (f"vectors/1/7-{'0' * 16}.parquet", "folders/versions/0.zip")
    for name in (
        *ours,
        "notes.txt",
        "folders/notes",
        "1/mine.jpg",
        "holiday/1/0.png",
        "vectors/notes",
        f"x/{key}",
        f"{key}.bak",
    ):
        blobs.put(name, b"x")

    assert [name for name, _ in blobs.all()] == [key]
    assert [name for place in (blobs.all_vector_files(), blobs.all_folders()) for name, _ in place] == [*ours]


def test_what_another_process_writes_or_removes_is_seen_at_once(blobs: Blobs) -> None:
    """No listing is remembered."""
    (key,) = blobs.write(1, [b"a"])
    assert [name for name, _ in blobs.all()] == [key]
    blobs._store.__class__(**blobs._store.storage_options).rm_file(blobs._path(key))

    assert not blobs.exists(key)
    assert list(blobs.all()) == []


def test_nothing_to_write_is_nothing_written(tmp_path: Path) -> None:
    assert Blobs(f"file://{tmp_path}", list, str).write(1, []) == []
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [MARKER]
