"""Notes beside versions: the error of one that cannot be written names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from index.errors import Unwritable
from training.comparison.provenance import write_note


def test_a_note_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "v1.json").mkdir()

    with pytest.raises(Unwritable, match=r"v1\.json could not be written: Is a directory"):
        write_note(tmp_path / "v1.json", {"seconds": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["v1.json"]
