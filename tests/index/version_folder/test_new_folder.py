"""index.version_folder.new_folder: a version folder is whole or not there, and nothing else is overwritten."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from index.errors import InvalidArgument
from index.version_folder.new_folder import check_target, clear_leftovers, new_folder


def break_off(out: Path) -> None:
    with new_folder(out) as made:
        (made / "card.json").write_text("second")
        raise KeyError


def test_a_new_folder_replaces_the_old_one_only_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "v1"
    with new_folder(out) as made:
        (made / "card.json").write_text("first")
        assert not out.exists()
    with pytest.raises(KeyError):
        break_off(out)
    assert (out / "card.json").read_text() == "first"
    with new_folder(out) as made:
        (made / "card.json").write_text("third")

    assert (out / "card.json").read_text() == "third"
    assert [p.name for p in out.parent.iterdir()] == ["v1"]


def test_what_takes_the_place_of_a_folder_is_on_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: set[int] = set()
    sync, rename = os.fsync, os.rename

    def synchronised(file: int) -> None:
        done.add(os.fstat(file).st_ino)
        sync(file)

    def renamed(old: Path, new: Path) -> None:
        assert {path.stat().st_ino for path in (old, *old.rglob("*"))} <= done
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synchronised)
    monkeypatch.setattr(os, "rename", renamed)
    with new_folder(tmp_path / "v1") as made:
        (made / "edges" / "v0").mkdir(parents=True)
        (made / "edges" / "v0" / "edge.json").write_text("edge")
        (made / "card.json").write_text("card")

    assert tmp_path.stat().st_ino in done


def test_what_a_killed_process_left_goes_but_for_what_nothing_took_the_place_of(tmp_path: Path) -> None:
    def holding(name: str, *parts: str) -> str:
        for part in parts:
            (tmp_path / name / part).mkdir(parents=True)
        return name

    holding(".v1.abcd_123", "new")
    between = holding(".v1.bcde2345", "new", "replaced")
    others = {
        holding(".v1.personal", "new", "letters"),
        holding(".v1.5.abcd_123", "new"),
        holding(".v2.abcd_123", "new"),
    }

    clear_leftovers(tmp_path / "v1")
    assert {path.name for path in tmp_path.iterdir()} == {between, *others}

    holding("v1", "edges")
    clear_leftovers(tmp_path / "v1")
    assert {path.name for path in tmp_path.iterdir()} == {"v1", *others}


WRITER = """
import pathlib, sys, time
from index.version_folder.new_folder import new_folder
with new_folder(pathlib.Path(sys.argv[1])) as made:
    (made / "card.json").write_text("half")
    print("writing", flush=True)
    time.sleep(600)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    out = tmp_path / "v1"
    with subprocess.Popen([sys.executable, "-c", WRITER, out], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        (left,) = names(tmp_path)
        try:
            with new_folder(out) as made:
                (made / "card.json").write_text("whole")
            assert names(tmp_path) == [left, "v1"]
        finally:
            writer.send_signal(signal.SIGKILL)

    with new_folder(out):
        pass
    assert names(tmp_path) == ["v1"]


def test_a_folder_that_is_removed_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    removed: list[str] = []

    def clear_first(file: int, operation: int) -> None:
        if not removed:
            removed.extend(names(tmp_path))
            clear_leftovers(tmp_path / "v1")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", clear_first)
    with new_folder(tmp_path / "v1") as made:
        assert names(tmp_path) == [made.parent.name] != removed
    assert names(tmp_path) == ["v1"]


def test_without_locks_whatever_may_belong_to_a_living_writer_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: int) -> None:
        raise OSError

    (tmp_path / ".v1.abcd_123" / "new").mkdir(parents=True)
    monkeypatch.setattr(fcntl, "flock", unsupported)
    with new_folder(tmp_path / "v1"):
        pass
    assert names(tmp_path) == [".v1.abcd_123", "v1"]


@pytest.mark.parametrize("name", ["-v1", "a b", "v" * 65, "..."])
def test_a_target_that_is_no_version_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="1 to 64 letters"):
        check_target(tmp_path / name)


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    check_target(tmp_path / "photos")
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")

    with pytest.raises(InvalidArgument, match="is not a version folder"):
        check_target(tmp_path / "photos")
    with pytest.raises(InvalidArgument, match="is not a version folder"):
        check_target(tmp_path / "photos" / "cat.jpg")


def test_no_version_is_written_into_another_ones_folder(tmp_path: Path) -> None:
    (tmp_path / "card.json").touch()

    for place in (tmp_path / "v2", tmp_path / "seed0" / "deeper" / "v2"):
        with pytest.raises(InvalidArgument, match=r"v2 is inside a version folder"):
            check_target(place)
