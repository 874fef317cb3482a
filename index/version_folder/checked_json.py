"""Read the JSON of a version folder with limits within which every JSON library can store and return it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from index.errors import InvalidVersionFolder

MAX_JSON_BYTES = 1 << 20
"""Largest size of a card.json or an edge.json."""
MAX_DEPTH = 32
MAX_DIGITS = 400
"""Integers of more digits are beyond float64 and slow to parse."""


def read_bounded(path: Path, name: str) -> bytes:
    """Read a file of at most `MAX_JSON_BYTES`. Raises InvalidVersionFolder if it is larger, or OSError."""
    with path.open("rb") as stream:
        content = stream.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise InvalidVersionFolder(f"{name} is larger than {MAX_JSON_BYTES} bytes", pointer=f"/{name}")
    return content


def parse_checked(raw: bytes, name: str) -> Any:
    """Parse and check JSON.

    Raises:
        InvalidVersionFolder: not JSON, more than `MAX_DEPTH` deep, a number that float64 cannot hold, or half of a
            surrogate pair; names the field at fault.
    """
    try:
        value = json.loads(raw, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise InvalidVersionFolder(f"{name} is not valid JSON ({error})", pointer=f"/{name}") from error
    _check(value, name, "", MAX_DEPTH)
    return value


def fits_float64(number: float) -> bool:
    """Whether a number is finite as float64, which large ints are not."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _integer(digits: str) -> float:
    return int(digits) if len(digits) <= MAX_DIGITS else math.inf


def _check(value: object, name: str, pointer: str, depth: int) -> None:
    if isinstance(value, str):
        _check_text(value, name, pointer)
    elif isinstance(value, (int, float)):
        if not fits_float64(value):
            raise _wrong(name, pointer, "must be a finite number (float64)")
    elif isinstance(value, (list, dict)):
        if not depth:
            raise _wrong(name, pointer[:100], f"is nested more than {MAX_DEPTH} levels deep")
        for field, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(field, str):
                _check_text(field, name, pointer)
            _check(inner, name, f"{pointer}/{field}", depth - 1)


def _check_text(text: str, name: str, pointer: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _wrong(name, pointer, "has half of a surrogate pair") from error


def _wrong(name: str, pointer: str, why: str) -> InvalidVersionFolder:
    return InvalidVersionFolder(f"{name}: {pointer.lstrip('/') or 'it'} {why}", pointer=pointer or f"/{name}")
