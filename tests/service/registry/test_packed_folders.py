"""Archives for remote workers: packed once for all who fetch one at a time, and gone with the last of them."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from index.version import Version
from service.http.backfills import remote_workers
from service.registry.packed_folders import PackedFolders
from staging.waiting import until

LARGE = bytes(20 << 20)
"""More than lies between a server and a client who does not read."""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_those_who_fetch_at_once_share_an_archive_and_whoever_comes_later_has_a_new_one(scratch: Path) -> None:
    folders, packed, together = PackedFolders(), [], threading.Barrier(4)

    def pack(archive: Path) -> None:
        packed.append(archive)
        archive.write_bytes(b"zip")

    def fetch(key: str) -> Path:
        together.wait(10)
        with folders.fetching(key, pack) as archive:
            together.wait(10)
            assert archive.read_bytes() == b"zip"
            together.wait(10)
            return archive

    with ThreadPoolExecutor(4) as others:
        found = list(others.map(fetch, "aaab"))

    assert sorted(packed) == sorted({*found})
    assert len(packed) == 2
    assert found[0] == found[1] == found[2] != found[3]
    assert list(scratch.iterdir()) == []
    with folders.fetching("a", pack) as again:
        assert again.is_file()
    assert len(packed) == 3


def test_what_cannot_be_packed_leaves_nothing_and_is_tried_again(scratch: Path) -> None:
    folders = PackedFolders()

    def fail(archive: Path) -> None:
        archive.write_bytes(b"half")
        raise OSError("full")

    with ExitStack() as stack, pytest.raises(OSError, match="full"):
        stack.enter_context(folders.fetching("a", fail))
    assert list(scratch.iterdir()) == []
    with folders.fetching("a", lambda archive: archive.touch()) as archive:
        assert archive.is_file()


def test_workers_that_fetch_a_version_at_once_take_the_room_of_one(
    served: Any, versions: dict[str, Version], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.register(versions["v1"])
    packed: list[Path] = []

    def pack(folder: Path, archive: Path) -> None:
        packed.append(folder)
        archive.write_bytes(LARGE)

    monkeypatch.setattr(remote_workers, "pack_version", pack)

    with ExitStack() as stack:
        several = [stack.enter_context(served.http.stream("GET", "/work/versions/v1")) for _ in range(3)]
        assert [len(list(scratch.iterdir())), len(packed)] == [1, 1]
        assert several[0].read() == LARGE
        assert len(list(scratch.iterdir())) == 1
    until(lambda: not list(scratch.iterdir()))  # of those who went away in the middle, too
