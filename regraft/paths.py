"""Paths of routes, made of names that may hold any character."""

from __future__ import annotations

from urllib.parse import quote


def path(*parts: object) -> str:
    """Segments joined by "/", each escaped."""
    return "/".join(_segment(str(part)) for part in parts)


def _segment(part: str) -> str:
    # An id may hold any character, also "/"; escaped it stays one segment. "." and ".." would otherwise climb.
    return part.replace(".", "%2E") if part in {".", ".."} else quote(part, safe=":")
