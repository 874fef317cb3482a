"""Open the version folders that are arguments of a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from index.errors import InvalidVersionFolder

if TYPE_CHECKING:
    from index.version import Version


def open_version(folder: Path) -> Version:
    """Load the version in a folder.

    Raises:
        InvalidVersionFolder: there is none, or it does not match its card; names the folder.
    """
    from index.version_folder.folder import load_version

    try:
        return load_version(folder)
    except InvalidVersionFolder as error:
        raise InvalidVersionFolder(f"{folder}: {error}", pointer=error.pointer) from error
