"""Build the paths and query parameters of routes."""

from __future__ import annotations

from urllib.parse import quote

from index.errors import InvalidArgument
from index.item_id import has_dot_segments, is_writable

MAX_PARAMS = 4096
"""Largest number of characters of query parameters; longer filters are sent in a body."""


def path_of(*parts: object) -> str:
    """The path below /v1/ with these segments, escaped.

    Raises:
        InvalidArgument: a segment would become a dot segment once a proxy or server decodes it.
    """
    return "/".join(_segment(str(part)) for part in parts)


def flag(value: bool) -> str:
    """A boolean as a query parameter."""
    return "true" if value else "false"


def change_params(dry_run: bool) -> dict[str, str]:
    """The query parameters of a change: `dry_run`, or none."""
    return {"dry_run": "true"} if dry_run else {}


def limit_params(limit: int | None) -> dict[str, int]:
    """The query parameters of a list: `limit`, or none."""
    return {} if limit is None else {"limit": limit}


def delete_params(name: object, dry_run: bool) -> dict[str, str]:
    """The query parameters of a deletion of more than one item, which must repeat the name."""
    return {"confirm": str(name), **change_params(dry_run)}


def _segment(part: str) -> str:
    if not part or not is_writable(part) or has_dot_segments(part):
        raise InvalidArgument(
            f"the name {part!r} must not be empty or have control characters or a part that is . or .."
        )
    # An id may contain "/"; escaped, it stays one segment.
    return quote(part, safe=":")
