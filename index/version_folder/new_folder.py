"""Write a version folder atomically: into a temporary folder next to it, which is renamed at the end.

The process that fills the temporary folder holds a lock on it (flock), which the system releases when the process ends,
however it ends. So the next process that writes the same version removes what a killed one left, and nothing else.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from index.durable import sync_all
from index.errors import InvalidArgument, Unwritable
from index.file_lock import locked_folder
from index.paths import paths_in
from index.version import CARD, NAME, Version

NEW, REPLACED = "new", "replaced"
"""The content of the temporary folder: the new version, and the version that it replaces."""


def check_target(out: Path, old: Version | None = None) -> None:
    """Check that a new version may be written to `out`, or replace the version there.

    Raises:
        InvalidArgument: its name is illegal or that of `old`, it is inside a version, or it is not a version folder.
    """
    if not NAME.fullmatch(out.name):
        raise InvalidArgument(
            f"{out}: the folder's name becomes the version's, so it must be 1 to 64 letters, digits, '.', '_' or '-'",
            pointer="/out",
        )
    if old is not None and old.name == out.name:
        raise InvalidArgument(f"{out} has the name of its old version {old.name!r}; choose another", pointer="/out")
    check_outside(out)
    if out.exists() and not (out / CARD).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidArgument(f"{out} exists and is not a version folder", pointer="/out")


def check_outside(path: Path) -> None:
    """Check that a path is not inside a version folder.

    Raises:
        InvalidArgument: it is.
    """
    if any((folder / CARD).is_file() for folder in path.parents):
        raise InvalidArgument(f"{path} is inside a version folder, which may only have its own files", pointer="/out")


def check_new(folder: Path) -> None:
    """Check that a version folder does not exist yet.

    Raises:
        InvalidArgument: it exists.
    """
    if (folder / CARD).exists():
        raise InvalidArgument(f"{folder} already exists; --overwrite (overwrite=True) replaces it", pointer="/folder")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder; it replaces `out` if the block succeeds, else it is removed.

    What killed processes left of the same version is removed first.

    Raises:
        Unwritable: it could not be written; `out` is unchanged.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(out)
        with _locked_scratch(out) as scratch:
            made = scratch / NEW
            made.mkdir()
            yield made
            _take_place(made, out, scratch / REPLACED)
    except OSError as error:
        why = error.strerror or str(error)
        raise Unwritable(f"{out} could not be written: {why}; its previous content is unchanged") from error


def clear_leftovers(out: Path) -> None:
    """Remove what processes left that were killed while they wrote `out`.

    A temporary folder with the version that was to be replaced is kept if nothing replaced it. On a file system without
    locks all are kept, as their processes may be alive.
    """
    scratch = re.compile(re.escape(f".{out.name}.") + r"\w{8}")
    for folder in filter(lambda path: scratch.fullmatch(path.name), out.parent.iterdir()):
        with locked_folder(folder) as abandoned:
            if not abandoned:
                continue
            held = {path.name for path in paths_in(folder, "*")}
            if held <= ({NEW, REPLACED} if out.exists() else {NEW}):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked_scratch(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`, locked, and removed at the end."""
    while True:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
            scratch = Path(name)
            with locked_folder(scratch, wait=True):
                # Before it is locked it looks abandoned: if another process removed it, try again.
                if scratch.exists():
                    yield scratch
                    return


def _take_place(made: Path, out: Path, aside: Path) -> None:
    """Rename `out` to `aside`, if it exists, and `made` to `out`; undo the first on failure or interruption."""
    sync_all([made, *made.rglob("*")])
    if out.exists():
        out.rename(aside)
    try:
        made.rename(out)
    except BaseException:
        if aside.exists():
            aside.rename(out)
        raise
    sync_all([out.parent])
