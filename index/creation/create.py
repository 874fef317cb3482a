"""Creating a version folder: a source fills it, it is checked as a registration does, then it is renamed.

A source is anything that can fill a folder: vectors made elsewhere (`index.creation.supplied`), an ONNX file
(`index.creation.onnx_file`), models of torch (`training.creation`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from index.folder import load_version, write_card
from index.new_folder import check_new, check_target, new_folder
from index.version import Card, Version


class Source(Protocol):
    """A source of a version."""

    def write(self, folder: Path, name: str) -> Card:
        """Write every file of a version but card.json into an empty folder.

        Returns:
            The card of version `name`, without the hashes.

        Raises:
            RegraftError: what is wrong, by the name of the field.
        """


def create_version(source: Source, folder: Path, *, overwrite: bool = False) -> Version:
    """Write a version folder and check it as a registration does.

    Args:
        source: what it is made of.
        folder: the folder to write; its name becomes the version's.
        overwrite: replace the version folder that is there.

    Raises:
        InvalidArgument: `folder` cannot be a version's folder, or is there; or the source says what is wrong with it.
        InvalidVersionFolder: what came out is no valid version: names the file and, inside JSON, the field at fault.
        Unwritable: the disk is full, or the like. Whatever is raised, what was there before still is.
    """
    check_target(folder)
    if not overwrite:
        check_new(folder)
    with new_folder(folder) as made:
        _check(made, write_card(made, source.write(made, folder.name)))
    return load_version(folder)


def _check(folder: Path, card: Card) -> None:
    if not card.encoder and not card.text:
        load_version(folder)
        return
    from index.encoder import verify_version  # opens models: a version of supplied vectors needs no onnxruntime

    verify_version(folder, batches=True)
