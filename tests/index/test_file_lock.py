"""Who waits for the lock of a file gets that of the file which then has its name."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from index.file_lock import locked, open_locked, try_lock


def is_locked(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY)
    try:
        return not try_lock(file)
    finally:
        os.close(file)


def test_who_waited_while_the_file_was_renamed_locks_the_one_that_has_its_name_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, opened, found = tmp_path / "part", threading.Event(), []
    lock = fcntl.flock

    def wait() -> None:
        with locked(part):
            found.append(is_locked(part))

    def told(file: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            opened.set()
        lock(file, how)

    waiting = threading.Thread(target=wait)
    with locked(part):
        monkeypatch.setattr(fcntl, "flock", told)
        waiting.start()
        opened.wait()
        part.rename(tmp_path / "whole")
        part.touch()
    waiting.join()

    assert found == [True]
    assert not is_locked(part)


def test_a_locked_file_is_refused_to_who_does_not_wait(tmp_path: Path) -> None:
    with locked(tmp_path / "ids"):
        assert open_locked(tmp_path / "ids") is None
    file = open_locked(tmp_path / "ids")
    assert file is not None
    os.close(file)
