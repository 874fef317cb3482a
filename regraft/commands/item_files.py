"""Files as items: their ids are paths below a folder, and must be distinct."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from index.errors import InvalidArgument
from index.paths import files_below


def by_id(files: Iterable[tuple[str, Path]]) -> dict[str, Path]:
    """Files by their ids, in order.

    Raises:
        InvalidArgument: a file is given twice, or two have the same id.
    """
    found: dict[str, Path] = {}
    for key, file in files:
        if (before := found.get(key)) is None:
            found[key] = file
        elif before == file:
            raise InvalidArgument(f"{file} is given twice")
        else:
            raise InvalidArgument(
                f"{before} and {file} have the same item id {key}: ingest them separately, with different --prefix"
            )
    return found


def below(path: Path, suffixes: Collection[str]) -> list[Path]:
    """The files of a folder with these suffixes, as `files_below`, sorted; or the path itself if it is not a folder.

    Raises:
        InvalidArgument: the path does not exist, or a folder cannot be listed.
    """
    if not path.exists():
        raise InvalidArgument(f"{path} does not exist")
    if not path.is_dir():
        return [path]
    return sorted(files_below(path, suffixes))


def label_of(file: Path) -> str:
    """The name of a file's folder; for a link, of the folder of the link."""
    return Path(os.path.normpath(file.absolute())).parent.name
