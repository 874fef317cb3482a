"""How names and flags are written into the paths and parameters of routes."""

from __future__ import annotations

from urllib.parse import quote


def path_of(*parts: object) -> str:
    """The path below /v1/ of these segments, each escaped."""
    return "/".join(_segment(str(part)) for part in parts)


def flag(value: bool) -> str:
    """A boolean as a parameter."""
    return "true" if value else "false"


def terms(dry_run: bool) -> dict[str, str]:
    """The parameters of a change: a rehearsal, or none."""
    return {"dry_run": "true"} if dry_run else {}


def _segment(part: str) -> str:
    # An id may hold any character, also "/"; escaped it stays one segment. "." and ".." would otherwise climb.
    return part.replace(".", "%2E") if part in {".", ".."} else quote(part, safe=":")
