"""Notes and measurements beside versions: written whole, also by two processes at once, or the error names the file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from index.durable import sync_all
from index.version_folder.new_folder import Unwritable
from training.comparison.provenance import read_note, write_note


def test_a_note_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "v1.json").mkdir()

    with pytest.raises(Unwritable, match=r"v1\.json could not be written: Is a directory"):
        write_note(tmp_path / "v1.json", {"seconds": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["v1.json"]


def test_two_processes_may_write_one_note_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note, sync = tmp_path / "v1.json", "training.comparison.provenance.sync_all"

    def other_process_writes(paths: Sequence[Path]) -> None:
        with monkeypatch.context() as there:
            there.setattr(sync, sync_all)
            there.setattr(os, "getpid", lambda: 1)
            write_note(note, {"seconds": 2})
        sync_all(paths)

    monkeypatch.setattr(sync, other_process_writes)
    write_note(note, {"seconds": 3})

    assert read_note(note) == {"seconds": 3}
    assert list(tmp_path.iterdir()) == [note]
