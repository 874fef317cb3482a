"""`Version`: a version folder in Python; `Version.create` writes one, `Version.load` reads and checks one."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import index.version
from index.creation.create import Source, create_version
from index.version_folder.folder import load_version


class Version(index.version.Version):
    """A checked version folder: its card, its folder and its edges."""

    @classmethod
    def create(cls, folder: Path, source: Source, *, overwrite: bool = False) -> Self:
        """Write a version folder for `regraft version register`. See `index.creation.create.create_version`.

        Args:
            folder: the folder to write; its name becomes the version's.
            source: the source of its files, such as `Supplied(768)` or `OnnxFile(path, preprocess)`.
            overwrite: replace an existing version folder.
        """
        return cls(**vars(create_version(source, folder, overwrite=overwrite)))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a version folder and check every file. See `index.version_folder.folder.load_version`."""
        return cls(**vars(load_version(folder)))
