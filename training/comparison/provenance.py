"""A note beside a version of the recipe and reference versions it was trained from; others are refused.

So results that took hours are replaced only where that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from index.durable import write_whole
from index.errors import InvalidArgument
from training.folder_lock import card_sha
from training.recipes import Recipe, recipe_from_json
from training.references import FIELDS, differences


def made_of(recipe: Recipe, references: Iterable[Path]) -> dict[str, Any]:
    """A recipe, and the card checksums of the versions that it names, as JSON."""
    return {"recipe": recipe.as_json(), "references": [card_sha(folder) for folder in references]}


def is_made(out: Path, note: Mapping[str, Any], origin: Mapping[str, Any], overwrite: bool) -> bool:
    """Whether a version folder holds what would be trained into it.

    Args:
        out: the folder.
        note: what is recorded of the version in it, from `begun` or with the fields of `origin`; {} if nothing is.
        origin: from `made_of`, with what else decides the result.
        overwrite: another version is to be replaced.

    Raises:
        InvalidArgument: it holds another version, which is not to be replaced; names what differs.
    """
    if not (there := card_sha(out)):
        return False
    different = ", ".join(_different({} if note.get("replaces") == there else note, origin))
    if different and not overwrite:
        raise InvalidArgument(
            f"{out} exists but was trained without {different}; choose another folder with --out, or replace it with "
            "--overwrite",
            pointer="/out",
        )
    return not different


def begun(out: Path, origin: Mapping[str, Any]) -> dict[str, Any]:
    """The note to write before a training into a folder.

    If the training ends and no other note can be written, this one tells its version from the one that it replaces.
    """
    return {**origin, "replaces": card_sha(out)}


def _different(note: Mapping[str, Any], origin: Mapping[str, Any]) -> Iterator[str]:
    """What of `origin` a version lacks; a reference that is not trained yet lacks nothing."""
    try:
        recipe, earlier = (recipe_from_json(made["recipe"]) for made in (origin, note))
    except (KeyError, InvalidArgument):
        yield "a note of its recipe that this release can read"
        return
    # The references are compared below, wherever their folders are.
    yield from (text for text in differences(recipe, earlier) if text.partition("=")[0] not in FIELDS)
    for name, wanted in origin.items():
        there = note.get(name)
        if name != "recipe" and not (there == wanted or (name == "references" and _may_become(wanted, there))):
            yield f"these {name}"


def _may_become(wanted: list[str], there: Any) -> bool:
    """Whether references with these checksums, "" where one is missing, can still become those of a version."""
    return (
        isinstance(there, list)
        and len(there) == len(wanted)
        and all(sha in {"", known} for sha, known in zip(wanted, there, strict=True))
    )


def read_note(path: Path) -> dict[str, Any]:
    """Read a note; {} where there is none, or half of one."""
    try:
        note = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def write_note(path: Path, note: dict[str, Any]) -> None:
    """Write a note, whole or not at all. Raises Unwritable."""
    write_whole(path, json.dumps(note, indent=1).encode())
