"""What is found in folders that others remove meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from index.encoders.image import FORMATS
from index.paths import IMAGE_SUFFIXES, READABLE, files_below, paths_in


def test_a_folder_that_goes_while_it_is_looked_through_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("going/one", "staying/two", ".hidden/three"):
        (tmp_path / name).mkdir(parents=True)

    def scandir(path: Any) -> Iterator[os.DirEntry[str]]:
        if str(path) == str(tmp_path / "going"):
            shutil.rmtree(tmp_path / "going")
        return look(path)

    look = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)

    assert paths_in(tmp_path, "*/*") == [tmp_path / "staying" / "two"]
    assert not (tmp_path / "going").exists()
    assert paths_in(tmp_path / "going", "*") == []


def test_files_of_every_format_are_images_as_browsers_and_telephones_name_them(tmp_path: Path) -> None:
    assert {Image.registered_extensions()[suffix] for suffix in READABLE} == set(FORMATS)
    for name in ("a/saved.JFIF", "b.png", "c.HEIC", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    assert {file.name for file in files_below(tmp_path, IMAGE_SUFFIXES)} == {"saved.JFIF", "b.png", "c.HEIC"}
