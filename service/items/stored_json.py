"""Check JSON that users store (metadata and labels), so that it can be sent back in any response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson

MAX_DEPTH = 32
"""Most levels of lists and objects; some JSON libraries do not read many more."""


def storage_problem(value: Any, max_bytes: int) -> str | None:
    """Why a JSON value cannot be stored; None: it can be.

    It is nested too deeply, takes more than `max_bytes`, or has half of a surrogate pair or a number beyond float64,
    which was read as infinite.
    """
    if are_plain([value], max_bytes):
        return None
    if not _is_shallow(value):
        return f"may be nested {MAX_DEPTH} deep"
    try:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())
    except UnicodeEncodeError:
        return "has half of a surrogate pair"
    except ValueError:
        return "must have only finite numbers (float64)"
    return f"has {size} bytes as JSON; at most {max_bytes} are legal" if size > max_bytes else None


def are_plain(values: Sequence[Any], max_bytes: int) -> bool:
    """A cheap check whether a value, or each of many objects, can be stored; False: `storage_problem` decides.

    False for values that are nested, large, or have null. orjson refuses halves of surrogate pairs and writes null for
    numbers that are not finite; Python's encoder writes numbers at most twice as long.
    """
    try:
        text = orjson.dumps(values)
    except (TypeError, ValueError):
        return False
    if text.count(b"{") + text.count(b"[") > len(values) + 1 or b"null" in text:
        return False
    # There are no more braces than objects, so none is within a text.
    each = text.split(b"},{") if len(values) > 1 else [text]
    return 2 * max(map(len, each)) <= max_bytes


def _is_shallow(value: Any) -> bool:
    """Whether no list or object is deeper than `MAX_DEPTH`; level by level, because of Python's recursion limit."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [container for container in level if isinstance(container, (dict, list))]
        if not containers:
            return True
        level = [
            inner
            for container in containers
            for inner in (container.values() if isinstance(container, dict) else container)
        ]
    return False
