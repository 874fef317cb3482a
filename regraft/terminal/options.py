"""Options and arguments that several commands have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from index.errors import InvalidArgument

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, but change nothing.")]
Gallery = Annotated[str, typer.Argument(metavar="GALLERY", help="Name of the gallery.")]
Newest = Annotated[
    int | None,
    typer.Option("--limit", min=1, max=1000, help="Number of the newest to list; default: all.", show_default=False),
]


def read_filter(text: str) -> dict[str, Any]:
    """Parse `--filter`. Raises InvalidArgument if it is not a JSON object."""
    return read_object(text, "filter", {"field": "city", "eq": "Bern"})


def read_object(text: str, option: str, example: Mapping[str, Any]) -> dict[str, Any]:
    """Parse an option that must be a JSON object. Raises InvalidArgument."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        told = f"--{option} must be JSON, such as {json.dumps(example)}: {error}"
        raise InvalidArgument(told, pointer=f"/{option}") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"--{option} must be a JSON object", pointer=f"/{option}")
    return found
