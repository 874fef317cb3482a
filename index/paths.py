"""List folders that other processes may change at the same time, and folders of users' files."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from glob import glob
from pathlib import Path

from index.errors import InvalidArgument

READABLE = frozenset({".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
IMAGE_SUFFIXES = READABLE | {".avif", ".heic", ".heif"}
"""Suffixes of image files: of `index.encoders.image.FORMATS`, and of others, so that these are refused, not skipped."""


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """The paths in a folder that match a pattern; names with a leading dot only if the pattern has one.

    Files removed during the call are left out; `Path.glob` raises FileNotFoundError for them up to Python 3.12.
    """
    return [folder / name for name in glob(pattern, root_dir=folder)]  # noqa: PTH207


def files_below(folder: Path, suffixes: Collection[str] | None, *, pointer: str = "") -> Iterator[Path]:
    """Files with these suffixes at any depth, following links, without hidden files and files of other programs.

    Args:
        folder: the folder to search.
        suffixes: in lower case, with their dot; None: all files.
        pointer: JSON pointer of the error.

    Raises:
        InvalidArgument: a folder cannot be listed; names it.
    """
    return _files_below(folder, suffixes, pointer, frozenset())


def _files_below(
    folder: Path, suffixes: Collection[str] | None, pointer: str, above: frozenset[Path]
) -> Iterator[Path]:
    """`above`: the real paths of the parent folders, to which links are not followed."""
    real = folder.resolve()
    if real in above:
        return
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if not _left_behind(entry.name)]
    except OSError as error:
        raise InvalidArgument(f"{folder} cannot be read: {error.strerror or error}", pointer=pointer) from error
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir():
            yield from _files_below(path, suffixes, pointer, above | {real})
        # A broken link is listed, so that reading it is reported; reading a pipe would never end.
        elif (suffixes is None or path.suffix.lower() in suffixes) and (entry.is_file() or entry.is_symlink()):
            yield path


def _left_behind(name: str) -> bool:
    """Whether a name is hidden, such as .thumbnails and .ipynb_checkpoints, or added to archives by macOS."""
    return name.startswith(".") or name == "__MACOSX"
