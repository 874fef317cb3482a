"""A note beside a version of the recipe and reference versions it was trained from; if they change, it is retrained."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from index.durable import sync_all
from index.version import CARD
from index.version_folder.folder import card_sha256
from training.recipes import Recipe


def made_of(recipe: Recipe, references: Iterable[Path]) -> dict[str, Any]:
    """A recipe, and the card checksums of the versions that it names, as JSON."""
    return {"recipe": recipe.as_json(), "references": [card_sha(folder) for folder in references]}


def card_sha(folder: Path) -> str:
    """The sha256 of a version's card, which holds its files' checksums; "" where there is no version."""
    return card_sha256(folder) if (folder / CARD).is_file() else ""


def read_note(path: Path) -> dict[str, Any]:
    """Read a note; {} where there is none, or half of one."""
    try:
        note = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def write_note(path: Path, note: dict[str, Any]) -> None:
    """Write a note."""
    write_whole(path, json.dumps(note, indent=1).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    sync_all([part])
    part.replace(path)
