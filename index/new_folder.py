"""A version folder on its way to disk: written beside its place and renamed at the end, so it is whole or not there."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from index.errors import InvalidArgument, RegraftError
from index.paths import paths_in
from index.version import CARD, NAME, Version

NEW, REPLACED = "new", "replaced"
"""What lies in the temporary folder: the version on its way, and the one whose place it takes."""


class Unwritable(RegraftError):
    """The version could not be written: the disk is full, or the folder may not be written to."""

    code = "unwritable"


def check_target(out: Path, old: Version | None = None) -> None:
    """Refuse a target that is no legal version name, the old version's, inside a version, or holds something else.

    Raises:
        InvalidArgument: names the folder.
    """
    if not NAME.fullmatch(out.name):
        raise InvalidArgument(
            f"{out}: the folder's name becomes the version's, so it must be 1 to 64 letters, digits, '.', '_' or '-'",
            pointer="/out",
        )
    if old is not None and old.name == out.name:
        raise InvalidArgument(f"{out} has the name of its old version {old.name!r}; choose another", pointer="/out")
    if (out.parent / CARD).is_file():
        raise InvalidArgument(f"{out} lies in a version's folder, which holds nothing but its files", pointer="/out")
    if out.exists() and not (out / CARD).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidArgument(f"{out} exists and is no version folder; it is left alone", pointer="/out")


def check_new(folder: Path) -> None:
    """Refuse a version folder that is there: whoever asks for it to be replaced does not call this.

    Raises:
        InvalidArgument: names the folder.
    """
    if (folder / CARD).exists():
        raise InvalidArgument(f"{folder} is there already; --overwrite (overwrite=True) replaces it", pointer="/folder")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `out` when the block ends well, and vanishes when it does not.

    Raises:
        Unwritable: it could not be written; `out` is as it was.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
            made = Path(scratch) / NEW
            made.mkdir()
            yield made
            _take_place(made, out, Path(scratch) / REPLACED)
    except OSError as error:
        why = error.strerror or str(error)
        raise Unwritable(f"{out} could not be written: {why}; what was there before still is") from error


def clear_leftovers(out: Path) -> None:
    """Remove what processes left that were killed while they wrote `out`; nobody may be writing it now.

    What was to be replaced stays where nothing took its place.
    """
    scratch = re.compile(re.escape(f".{out.name}.") + r"\w{8}")
    for folder in filter(lambda path: scratch.fullmatch(path.name), out.parent.iterdir()):
        held = {path.name for path in paths_in(folder, "*")}
        if held <= ({NEW, REPLACED} if out.exists() else {NEW}):
            shutil.rmtree(folder, ignore_errors=True)


def _take_place(made: Path, out: Path, aside: Path) -> None:
    """Rename `made` to `out`; what is there goes aside, and comes back if that fails or is interrupted."""
    if out.exists():
        out.rename(aside)
    try:
        made.rename(out)
    except BaseException:
        if aside.exists():
            aside.rename(out)
        raise
