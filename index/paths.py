"""Listing folders that others may change meanwhile, or that hold what a user stores or trains on."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from glob import glob
from pathlib import Path

from index.errors import InvalidArgument

READABLE = frozenset({".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
IMAGE_SUFFIXES = READABLE | {".avif", ".heic", ".heif"}
"""How files of images end: those of `index.image.FORMATS`, and others, which are refused by name and not left out."""


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """The paths in a folder that match a pattern; names with a leading dot only if the pattern has one.

    Files that are removed meanwhile are left out: `Path.glob` raises FileNotFoundError then, up to Python 3.12.
    """
    return [folder / name for name in glob(pattern, root_dir=folder)]  # noqa: PTH207


def files_below(folder: Path, suffixes: Collection[str], *, pointer: str = "") -> Iterator[Path]:
    """Files with these suffixes, at any depth, through links, without hidden files and leftovers of other programs.

    Args:
        folder: to search.
        suffixes: in lower case, with their dot.
        pointer: of the error.

    Raises:
        InvalidArgument: a folder cannot be listed; names it.
    """
    return _files_below(folder, suffixes, pointer, frozenset())


def _files_below(folder: Path, suffixes: Collection[str], pointer: str, above: frozenset[Path]) -> Iterator[Path]:
    """`above`: the real parent folders: a link to one of them would never end."""
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
        # Whoever reads a link to nothing says so; reading a pipe would never end.
        elif path.suffix.lower() in suffixes and (entry.is_file() or entry.is_symlink()):
            yield path


def _left_behind(name: str) -> bool:
    """Thumbnails, checkpoints of notebooks, what macOS packs beside files."""
    return name.startswith(".") or name == "__MACOSX"
