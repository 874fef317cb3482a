"""Looking into folders that others empty or remove meanwhile."""

from __future__ import annotations

from glob import glob
from pathlib import Path


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """What a pattern matches in a folder; names with a dot first only where the pattern has one there.

    What goes while it looks is not there. `Path.glob` raises FileNotFoundError then, up to Python 3.12.
    """
    return [folder / name for name in glob(pattern, root_dir=folder)]  # noqa: PTH207
