"""A file is what it was or what was written, wherever its writer is killed or fails, and however many write it."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from index import durable, file_lock
from index.durable import whole_file, write_whole
from index.errors import Unwritable

OLD, NEW = b"old" * 1000, b"new" * 2000
TRACED = {durable.__file__, file_lock.__file__, __file__}

# Python 3.12 warns of it beside threads: the children here do no more than write a file.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def write_in_halves(path: Path, content: bytes) -> None:
    with whole_file(path) as part, part.open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        file.write(content[len(content) // 2 :])


def in_child(work: Callable[[], object]) -> int:
    """Run a function in another process, which ends with it; returns the process."""
    if child := os.fork():
        return child
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def killed_at_line(number: int, work: Callable[[], object]) -> None:
    """Run a function and kill this process at so many lines of the code that writes."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in TRACED:
            return None
        lines += event == "line"
        if lines > number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    work()


@pytest.mark.parametrize("before", [OLD, None])
def test_a_kill_at_any_line_leaves_the_old_file_or_the_new_one_and_the_next_write_nothing_else(
    before: bytes | None, tmp_path: Path
) -> None:
    path, found, left, line = tmp_path / "runs" / "note.json", set(), 0, 0
    path.parent.mkdir()
    while True:
        path.unlink(missing_ok=True)
        if before is not None:
            path.write_bytes(before)
        child = in_child(partial(killed_at_line, line, partial(write_in_halves, path, NEW)))
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            break
        content = path.read_bytes() if path.exists() else None
        assert content in {before, NEW}, line
        found.add(content)
        left += len(list(path.parent.iterdir())) > (content is not None)
        write_whole(path, b"next")
        assert (path.read_bytes(), list(path.parent.iterdir())) == (b"next", [path])
        line += 1

    assert found == {before, NEW}
    assert left > 3


def test_a_full_disk_names_the_file_and_leaves_it_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_bytes(OLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(NEW) // 2, hard))
    try:
        with pytest.raises(Unwritable, match=r"table\.md could not be written: File too large"):
            write_whole(path, NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_is_found_full_only_when_it_is_written_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.md"
    path.write_bytes(OLD)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Unwritable, match=r"table\.md could not be written: No space left on device"):
        write_whole(path, NEW)

    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


def test_what_ends_the_block_is_raised_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(OLD)

    def interrupted() -> None:
        with whole_file(path) as part:
            part.write_bytes(NEW)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


def test_content_is_on_the_disk_before_its_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    sync, replace = os.fsync, os.replace

    def synchronised(file: int) -> None:
        done.append(os.fstat(file).st_ino)
        sync(file)

    def replaced(*given: Any) -> None:
        done.append("renamed")
        replace(*given)

    monkeypatch.setattr(os, "fsync", synchronised)
    monkeypatch.setattr(os, "replace", replaced)
    write_whole(path := tmp_path / "note.json", NEW)

    assert done == [path.stat().st_ino, "renamed", tmp_path.stat().st_ino]


def test_a_file_system_that_cannot_synchronise_folders_or_lock_files_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def of_files(file: int) -> None:
        if os.path.samestat(os.fstat(file), tmp_path.stat()):
            raise OSError(22, "Invalid argument")
        sync(file)

    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "fsync", of_files)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    write_whole(path := tmp_path / "note.json", NEW)

    assert path.read_bytes() == NEW


def test_processes_that_write_one_file_at_once_leave_it_whole_at_every_moment(tmp_path: Path) -> None:
    path, contents = tmp_path / "note.json", [bytes([65 + writer]) * (10_000 + writer) for writer in range(4)]
    write_whole(path, OLD)

    def write_often(content: bytes) -> None:
        for _ in range(25):
            write_in_halves(path, content)

    writers = {in_child(partial(write_often, content)) for content in contents}
    read = set()
    while writers:
        read.add(path.read_bytes())
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in writers:
            assert status == 0
            writers.remove(ended)

    assert read <= {OLD, *contents}
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]
