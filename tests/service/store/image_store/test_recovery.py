"""An image store that failed is asked again until it answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.store.image_store.blobs import MARKER, Blobs, StoreUnreachable
from service.store.image_store.recovery import StoreRecovery


class TestAskedAgain:
    """Readiness tells of a store as long as its `problem` lasts, which nobody else may end: no image is in use."""

    def test_one_that_is_back_is_no_problem_any_more(self, tmp_path: Path) -> None:
        root = tmp_path / "blobs"
        blobs = Blobs(f"file://{root}", lambda: ["1/of-a-row"] if root.exists() else [], str)
        blobs.write(1, [b"first"])
        root.rename(tmp_path / "elsewhere")
        root.mkdir()
        recovery = StoreRecovery(blobs)
        with pytest.raises(StoreUnreachable):
            blobs.check()

        recovery.look()
        assert "unreachable" in str(blobs.problem)

        root.rmdir()
        (tmp_path / "elsewhere").rename(root)
        recovery.look()
        assert blobs.problem is None

    def test_one_that_refused_a_file_is_asked_to_take_another_in_the_same_folder(self, tmp_path: Path) -> None:
        blobs = Blobs(f"file://{tmp_path}", list, str)
        (first,) = blobs.write(1, [b"first"])
        (tmp_path / "2").touch()
        recovery = StoreRecovery(blobs)
        with pytest.raises(StoreUnreachable):
            blobs.write(2, [b"second"])

        recovery.look()
        assert "cannot be written" in str(blobs.problem)

        (tmp_path / "2").unlink()  # the gallery's folder is missing now
        recovery.look()
        assert blobs.problem is None
        assert sorted(path.name for path in tmp_path.iterdir()) == [MARKER, "1"]
        assert [path.name for path in (tmp_path / "1").iterdir()] == [first.partition("/")[2]]

    def test_one_without_a_problem_is_not_asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        blobs = Blobs(f"file://{tmp_path}", list, str)
        monkeypatch.setattr(Blobs, "check", lambda _: pytest.fail("asked"))

        StoreRecovery(blobs).look()
