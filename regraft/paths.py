"""How names and flags are written into the paths and parameters of routes."""

from __future__ import annotations

from urllib.parse import quote

from index.errors import InvalidArgument
from index.item_id import has_dot_segments, is_writable

MAX_PARAMS = 4096
"""Characters of options that travel in an address; longer filters travel in a body."""


def path_of(*parts: object) -> str:
    """The path below /v1/ of these segments, each escaped.

    Raises:
        InvalidArgument: one would become a dot segment once a proxy or server decodes it.
    """
    return "/".join(_segment(str(part)) for part in parts)


def flag(value: bool) -> str:
    """A boolean as a parameter."""
    return "true" if value else "false"


def change_params(dry_run: bool) -> dict[str, str]:
    """The parameters of a change: a dry run, or none."""
    return {"dry_run": "true"} if dry_run else {}


def limit_params(limit: int | None) -> dict[str, int]:
    """The parameters of a list: its newest `limit`, or all."""
    return {} if limit is None else {"limit": limit}


def delete_params(name: object, dry_run: bool) -> dict[str, str]:
    """The parameters of a deletion of more than an item, which says once more what it deletes."""
    return {"confirm": str(name), **change_params(dry_run)}


def _segment(part: str) -> str:
    if not part or not is_writable(part) or has_dot_segments(part):
        raise InvalidArgument(
            f"{part!r} names nothing: a name is not empty, and holds no control characters and no part that is . or .."
        )
    # An id may hold nearly any character, also "/"; escaped it stays one segment.
    return quote(part, safe=":")
