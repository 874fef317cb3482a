"""What a version was made of, kept in a note beside it: made of anything else, it is trained again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from index.version import CARD
from training.recipes import Recipe


def made_of(recipe: Recipe, references: Iterable[Path]) -> dict[str, Any]:
    """A recipe, and the very versions that it names."""
    return {"recipe": recipe.as_json(), "references": [card_sha(folder) for folder in references]}


def card_sha(folder: Path) -> str:
    """The sha256 of a version's card, which holds those of its files; "" where there is no version."""
    card = folder / CARD
    return hashlib.sha256(card.read_bytes()).hexdigest() if card.is_file() else ""


def read_note(path: Path) -> dict[str, Any]:
    """What a note says; nothing where there is none, or half of one."""
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def write_note(path: Path, said: dict[str, Any]) -> None:
    """Write a note."""
    write_whole(path, json.dumps(said, indent=1).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
