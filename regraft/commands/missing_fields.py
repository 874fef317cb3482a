"""A hint after a filter that nothing passed: which of its fields no item has, such as misspelt ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from index.errors import RegraftError
from index.metadata.filter import parse_filter, paths_of
from regraft.client import Client
from regraft.terminal.answers import err

SAMPLE = 100
"""Items whose fields are named."""
SHOWN = 20

FieldPath = tuple[str, ...]


def print_missing_fields(client: Client, gallery: str, where: Mapping[str, Any]) -> None:
    """Print to standard error each field of a filter that no item has, with the fields of the first items.

    Fields of a gallery of more than 65,536 items, which the service examines in several pages, are not looked for.
    """
    with suppress(RegraftError):  # the answer itself was no error
        held = dict.fromkeys(path for one in client.items(gallery, limit=SAMPLE).items for path in _paths(one.metadata))
        if not held:
            return
        missing = [_name(path) for path in paths_of(parse_filter(where)) if _is_missing(client, gallery, path, held)]
        if missing:
            names = ", ".join([*map(_name, islice(held, SHOWN)), *(["..."] if len(held) > SHOWN else [])])
            err.print(f"hint: no item has a field {' or '.join(missing)}; the first items have: {names}")


def _is_missing(client: Client, gallery: str, path: FieldPath, held: Mapping[FieldPath, None]) -> bool:
    if any(known[: len(path)] == path for known in held):
        return False
    page = client.items(gallery, limit=1, filter={"field": list(path), "exists": True})
    return not page.items and page.next is None


def _paths(value: object, above: FieldPath = ()) -> Iterator[FieldPath]:
    """The paths to the values in metadata, by object keys; an array's elements are at its own path."""
    if isinstance(value, Mapping) and (value or not above):
        for key, inner in value.items():
            yield from _paths(inner, (*above, key))
    elif isinstance(value, list) and any(isinstance(inner, Mapping | list) for inner in value):
        for inner in value:
            yield from _paths(inner, above)
    else:
        yield above


def _name(path: FieldPath) -> str:
    """A field as a filter names it."""
    return json.dumps(path if any("." in key or not key for key in path) else ".".join(path), ensure_ascii=False)
