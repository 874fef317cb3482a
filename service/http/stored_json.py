"""JSON that users store with what is theirs, metadata and labels: only what can be sent to everyone who finds it."""

from __future__ import annotations

import json
from typing import Any

import orjson

MAX_DEPTH = 32
"""Levels of lists and objects; some JSON libraries read hardly more."""


def why_not_stored(value: Any, most: int) -> str | None:
    """What keeps a JSON value of at most `most` bytes from being stored; None: nothing.

    It may be nested too deep, too large, hold a number beyond float64, which was read as infinite, or half of a
    surrogate pair.
    """
    if _is_surely_stored(value, most):
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


def _is_surely_stored(value: Any, most: int) -> bool:
    """Whether it is, told at a fifth of the cost; of what is nested, large, or holds null it is not told.

    orjson writes no half of a surrogate pair, and for a number that is not finite null; its numbers are no longer
    than twice those of Python's encoder.
    """
    try:
        text = orjson.dumps(value)
    except (TypeError, ValueError):
        return False
    return 2 * len(text) <= most and text.count(b"{") + text.count(b"[") <= 1 and b"null" not in text


def _is_shallow(value: Any) -> bool:
    """Whether no list or object lies deeper than `MAX_DEPTH`. A level at a time: Python calls no deeper than it may."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [one for one in level if isinstance(one, (dict, list))]
        if not containers:
            return True
        level = [inner for one in containers for inner in (one.values() if isinstance(one, dict) else one)]
    return False
