"""Folders on their way in, beside services that start on the same folders."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from index import incoming

KILLED = """
import os, sys, pathlib
from index.incoming import incoming_folder
with incoming_folder(pathlib.Path(sys.argv[1])) as place:
    (place / "half").touch()
    os._exit(9)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_sweep_takes_what_the_killed_left_and_nothing_that_is_being_filled(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False).returncode == 9
    (left,) = names(tmp_path)
    (tmp_path / "v2").mkdir()
    with incoming.incoming_folder(tmp_path) as place:
        (place / "folder").mkdir()
        assert names(tmp_path) == sorted([left, place.name, "v2"])
        incoming.sweep(tmp_path)
        assert names(tmp_path) == [place.name, "v2"]
        (place / "folder").rename(tmp_path / "v3")
    assert names(tmp_path) == ["v2", "v3"]


def test_a_folder_that_is_swept_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    swept: list[list[str]] = []

    def sweep_first(lock: int, operation: int) -> None:
        if not swept:
            swept.append(names(tmp_path))
            incoming.sweep(tmp_path)
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    with incoming.incoming_folder(tmp_path) as place:
        assert swept == [swept[0]] != [[place.name]]
        assert names(tmp_path) == [place.name]
