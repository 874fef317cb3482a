"""Change version folders and update the sha256 in their cards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from index.version import CARD, Version
from index.version_folder.card import parse_card
from index.version_folder.folder import load_version, write_card


def rehash(folder: Path) -> Version:
    """Write the card for the present files, and load the version."""
    write_card(folder, parse_card(json.loads((folder / CARD).read_text())))
    return load_version(folder)


def change_model(folder: Path, name: str, change: Callable[[Any], None]) -> Version:
    """Change one of the folder's ONNX models in place."""
    model = onnx.load(folder / name)
    change(model)
    (folder / name).write_bytes(model.SerializeToString())
    return rehash(folder)
