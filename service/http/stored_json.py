"""JSON that users store with what is theirs, metadata and labels: only what can be sent to everyone who finds it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson

MAX_DEPTH = 32
"""Levels of lists and objects; some JSON libraries read hardly more."""


def why_not_stored(value: Any, most: int) -> str | None:
    """What keeps a JSON value of at most `most` bytes from being stored; None: nothing.

    It may be nested too deep, too large, hold a number beyond float64, which was read as infinite, or half of a
    surrogate pair.
    """
    if are_surely_stored([value], most):
        return None
    if not _is_shallow(value):
        return f"may be nested {MAX_DEPTH} deep"
    try:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())
    except UnicodeEncodeError:
        return "holds half of a surrogate pair"
    except ValueError:
        return "must hold finite numbers (float64)"
    return f"takes {size} bytes as JSON; at most {most}" if size > most else None


def are_surely_stored(values: Sequence[Any], most: int) -> bool:
    """Whether a value, or each of many objects, is: at a fraction of the cost.

    It is not told of what is nested, large, or holds null. orjson writes no half of a surrogate pair, and for a number
    that is not finite null; its numbers are no longer than twice those of Python's encoder.
    """
    try:
        text = orjson.dumps(values)
    except (TypeError, ValueError):
        return False
    if text.count(b"{") + text.count(b"[") > len(values) + 1 or b"null" in text:
        return False
    # No brace is within a text, for there are no more than objects.
    each = text.split(b"},{") if len(values) > 1 else [text]
    return 2 * max(map(len, each)) <= most


def _is_shallow(value: Any) -> bool:
    """Whether no list or object lies deeper than `MAX_DEPTH`. A level at a time: Python calls no deeper than it may."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [one for one in level if isinstance(one, (dict, list))]
        if not containers:
            return True
        level = [inner for one in containers for inner in (one.values() if isinstance(one, dict) else one)]
    return False
