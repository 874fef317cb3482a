"""A version folder in Python: `Version.create` writes one, `Version.load` reads and checks one."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import index.version
from index.creation.create import Source, create_version
from index.folder import load_version


class Version(index.version.Version):
    """A version folder that has been checked: its card, its folder and its edges."""

    @classmethod
    def create(cls, folder: Path, source: Source, *, overwrite: bool = False) -> Self:
        """Write a version folder that `regraft version register` takes. See `index.creation.create.create_version`.

        Args:
            folder: the folder to write; its name becomes the version's.
            source: what it is made of, such as `Supplied(768)` or `OnnxFile(path, preprocess)`.
            overwrite: replace the version folder that is there.
        """
        return cls(**vars(create_version(source, folder, overwrite=overwrite)))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a version folder, every file held to its card. See `index.folder.load_version`."""
        return cls(**vars(load_version(folder)))
