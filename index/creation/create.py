"""Create a version folder (`create_version`): a source fills it, a registration's checks run, then it is renamed.

Sources: vectors from outside (`index.creation.supplied`), an ONNX file (`index.creation.onnx_file`), torch models
(`training.creation`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from index.version import Card, Version
from index.version_folder.folder import load_version, write_card
from index.version_folder.new_folder import check_new, check_target, new_folder


class Source(Protocol):
    """A source of a version."""

    def write(self, folder: Path, name: str) -> Card:
        """Write all files of a version except card.json into an empty folder.

        Returns:
            The card of version `name`, without the hashes.

        Raises:
            RegraftError: the source is invalid; names the field.
        """


def create_version(source: Source, folder: Path, *, overwrite: bool = False) -> Version:
    """Write a version folder and run the checks of a registration. On errors an existing folder is unchanged.

    Args:
        source: the source of its files.
        folder: the folder to write; its name becomes the version's.
        overwrite: replace an existing version folder.

    Raises:
        InvalidArgument: `folder` cannot be a version's folder, or exists; or the source is invalid.
        InvalidVersionFolder: the result is not a valid version; names the file and, inside JSON, the field at fault.
        Unwritable: the folder cannot be written, for example because the disk is full.
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
    # It opens models: a version of supplied vectors needs no onnxruntime.
    from index.encoders.encoder import verify_version

    verify_version(folder, batches=True)
