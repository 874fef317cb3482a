"""`Projection`: the metadata fields that an answer shows, named as in filters (docs/filters.md)."""

from __future__ import annotations

import json
from typing import Any

from index.errors import InvalidArgument

MAX_FIELDS = 100
MAX_LENGTH = 1024
"""Longest field, in characters."""
NOTHING: dict[str, Any] = {}


class Projection:
    """Selects fields of JSON objects; an array on a path stands for each object in it.

    Raises:
        InvalidArgument: `fields` is not a list of at most `MAX_FIELDS` paths like "name" or "outer.inner".
    """

    def __init__(self, fields: object) -> None:
        self._tree: dict[str, Any] = {}
        if not isinstance(fields, list) or len(fields) > MAX_FIELDS:
            raise InvalidArgument(f"fields must be a list of at most {MAX_FIELDS} fields", pointer="/fields")
        for number, field in enumerate(fields):
            if not isinstance(field, str) or len(field) > MAX_LENGTH or not all(field.split(".")):
                raise InvalidArgument('a field must be "name" or "outer.inner"', pointer=f"/fields/{number}")
            *outer, last = field.split(".")
            node: dict[str, Any] | None = self._tree
            for key in outer:
                node = None if node is None else node.setdefault(key, {})
            if node is not None:
                node[last] = None  # the whole field, even if parts of it are named too

    def of(self, metadata: str) -> dict[str, Any]:
        """The selected fields of a JSON object given as text."""
        if not self._tree:
            return NOTHING
        shown: dict[str, Any] = _picked(json.loads(metadata), self._tree)
        return shown


def _picked(value: Any, tree: dict[str, Any] | None) -> Any:
    if tree is None:
        return value
    if isinstance(value, list):
        return [_picked(one, tree) for one in value if isinstance(one, (dict, list))]
    below = ((key, inner, tree[key]) for key, inner in value.items() if key in tree)
    return {key: _picked(inner, more) for key, inner, more in below if more is None or isinstance(inner, (dict, list))}
