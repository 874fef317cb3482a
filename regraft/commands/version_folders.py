"""Version folders of a command that is given several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from index.errors import InvalidVersionFolder

if TYPE_CHECKING:
    from index.version import Version


def open_version(folder: Path) -> Version:
    """The version in a folder.

    Raises:
        InvalidVersionFolder: it does not match its card, or there is none; names the folder.
    """
    from index.folder import load_version

    try:
        return load_version(folder)
    except InvalidVersionFolder as error:
        raise InvalidVersionFolder(f"{folder}: {error}", pointer=error.pointer) from error
