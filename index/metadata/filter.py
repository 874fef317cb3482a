"""Metadata filters: parse JSON (`parse_filter`) into a checked expression. docs/filters.md describes the language.

A filter is one condition, `{"field": "shop.city", "eq": "Bern"}`, or filters joined by `and`, `or` and `not`. The class
of each test defines what it means for an item; `index.metadata.metadata` evaluates it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from index.errors import InvalidFilter, pointer_to, shortened

Scalar = str | int | float | bool | None

POINTER = "/filter"
"""The JSON pointer of a filter in every request."""
MAX_DEPTH = 16
"""Maximum nesting of `and`, `or` and `not`."""
MAX_CONDITIONS = 100
MAX_VALUES = 10_000
"""Maximum number of values in one `in`, and in all lists of a filter."""
MAX_KEYS = 100
"""Maximum number of keys of a path."""


@dataclass(frozen=True)
class OneOf:
    """A value of the field equals one of these. Numbers compare by value (1 == 1.0); true and false are not numbers."""

    values: tuple[Scalar, ...]


@dataclass(frozen=True)
class Bound:
    """One end of a range, a number or a string; `closed`: the end itself is included."""

    value: float | str
    closed: bool


@dataclass(frozen=True)
class Range:
    """A value of the field lies between both ends: numbers by value, strings by code points; types never mix."""

    lower: Bound | None
    upper: Bound | None


@dataclass(frozen=True)
class Prefix:
    """A value of the field is a string that begins with this."""

    text: str


@dataclass(frozen=True)
class Exists:
    """The field exists, with any value (also null, {} or []); `wanted` False: it does not exist."""

    wanted: bool


Test = OneOf | Range | Prefix | Exists


@dataclass(frozen=True)
class Condition:
    """A test of the field at a path of object keys. An array on the path passes if any of its elements does."""

    path: tuple[str, ...]
    test: Test


@dataclass(frozen=True)
class And:
    """All of the parts hold."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True)
class Or:
    """At least one of the parts holds."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True)
class Not:
    """The part does not hold: true also for an item without the field."""

    part: Filter


Filter = Condition | And | Or | Not


def parse_filter(value: object) -> Filter:
    """Parse and check a filter, given as parsed JSON; in every request it is the field `filter`.

    Raises:
        InvalidFilter: not legal by docs/filters.md; its pointer is the place, its message says what is legal there.
    """
    return _parse(value, POINTER, 1, _Size())


def keys_of(where: Filter) -> frozenset[str]:
    """The top-level keys of metadata that a filter tests."""
    return frozenset(path[0] for path in paths_of(where))


def paths_of(where: Filter) -> list[tuple[str, ...]]:
    """The fields that a filter tests, each once, in its order."""
    match where:
        case Condition(path, _):
            return [path]
        case Not(part):
            return paths_of(part)
        case And(parts) | Or(parts):
            return list(dict.fromkeys(chain.from_iterable(map(paths_of, parts))))


def value_at(metadata: Mapping[str, Any], field: str) -> Any:
    """The value of metadata at a field, which is a key or a path of object keys ("outer.inner"); None: no value."""
    if field in metadata:
        return metadata[field]
    found: Any = metadata
    for key in field.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found


def value_text(value: Any) -> str:
    """A JSON value as canonical text, equal for equal values: as in filters 1 equals 1.0, but not "1"."""
    return json.dumps(_with_whole_numbers(value), sort_keys=True)


def _with_whole_numbers(value: Any) -> Any:
    match value:
        case float():
            return int(value) if value.is_integer() else value
        case list():
            return [_with_whole_numbers(element) for element in value]
        case dict():
            return {key: _with_whole_numbers(element) for key, element in value.items()}
        case _:
            return value


class _Size:
    """Counts the conditions and values of a filter while it is parsed, to refuse a large one early."""

    def __init__(self) -> None:
        self._conditions = self._values = 0

    def add(self, read: Condition) -> Condition:
        """Count a condition."""
        self._conditions += 1
        self._values += len(read.test.values) if isinstance(read.test, OneOf) else 1
        self._check(self._conditions, MAX_CONDITIONS, "conditions")
        self._check(self._values, MAX_VALUES, "values in its lists")
        return read

    def _check(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise InvalidFilter(f"a filter has at most {most} {what}", pointer=POINTER)


def _parse(value: object, at: str, depth: int, size: _Size) -> Filter:
    if not isinstance(value, dict):
        raise InvalidFilter(f"a filter must be a JSON object, not {_named(value)}; {SHAPE}", pointer=at)
    if "field" in value:
        return size.add(_condition(value, at))
    if depth > MAX_DEPTH:
        raise InvalidFilter(f"and, or and not may be nested {MAX_DEPTH} deep", pointer=at)
    if len(value) != 1 or not set(value) <= set(JOINS):
        wrong = next((name for name in value if name not in JOINS), None)
        if wrong is None:
            raise InvalidFilter(f"a filter must have exactly one name, not {len(value)}; {SHAPE}", pointer=at)
        raise InvalidFilter(f"unknown name {shortened(wrong)!r}; {SHAPE}", pointer=at + pointer_to(wrong))
    ((name, inner),) = value.items()
    if name == "not":
        return Not(_parse(inner, f"{at}/not", depth + 1, size))
    listed = enumerate(_listed(inner, f"{at}/{name}"))
    parts = tuple(_parse(part, f"{at}/{name}/{n}", depth + 1, size) for n, part in listed)
    return And(parts) if name == "and" else Or(parts)


def _condition(value: dict[str, object], at: str) -> Condition:
    path = _path(value["field"], f"{at}/field")
    operators = [name for name in value if name != "field"]
    if unknown := [name for name in operators if name not in OPERATORS]:
        name, legal = shortened(unknown[0]), ", ".join(OPERATORS)
        raise InvalidFilter(f"unknown operator {name!r}; legal: {legal}", pointer=at + pointer_to(name))
    if len(operators) != 1:
        legal = ", ".join(OPERATORS)
        raise InvalidFilter(
            f"a condition must have exactly one operator, not {len(operators)}; legal: {legal}", pointer=at
        )
    operator = operators[0]
    return Condition(path, OPERATORS[operator](value[operator], f"{at}/{operator}"))


def _path(value: object, at: str) -> tuple[str, ...]:
    if isinstance(value, str):
        keys = value.split(".")
        legal = all(keys)
    else:
        keys = value if isinstance(value, list) else []
        legal = bool(keys) and all(isinstance(key, str) for key in keys)
    if not legal or len(keys) > MAX_KEYS:
        shape = f'a field must be "name", "outer.inner", or a list of 1 to {MAX_KEYS} keys such as ["outer", "a.b"]'
        raise InvalidFilter(f"{shape}; a key that is empty or has a dot requires the list", pointer=at)
    return tuple(keys)


def _equal(value: object, at: str) -> OneOf:
    return OneOf((_scalar(value, at),))


def _one_of(value: object, at: str) -> OneOf:
    listed = _listed(value, at)
    if len(listed) > MAX_VALUES:
        raise InvalidFilter(f"in has {len(listed)} values; at most {MAX_VALUES} are legal", pointer=at)
    return OneOf(tuple(_scalar(one, f"{at}/{number}") for number, one in enumerate(listed)))


def _prefix(value: object, at: str) -> Prefix:
    if not isinstance(value, str):
        raise InvalidFilter(f"prefix must be a string, not {_named(value)}", pointer=at)
    return Prefix(_whole(value, at))


def _exists(value: object, at: str) -> Exists:
    if not isinstance(value, bool):
        raise InvalidFilter(f"exists must be true or false, not {_named(value)}", pointer=at)
    return Exists(value)


def _range(value: object, at: str) -> Range:
    legal = f"legal: {', '.join(LOWER)} and {', '.join(UPPER)}, at most one of each pair"
    if not isinstance(value, dict) or not value:
        raise InvalidFilter(f'range must be an object such as {{"gte": 1, "lt": 5}}; {legal}', pointer=at)
    if unknown := [name for name in value if name not in {*LOWER, *UPPER}]:
        raise InvalidFilter(f"unknown bound {shortened(unknown[0])!r}; {legal}", pointer=at + pointer_to(unknown[0]))
    lower, upper = (_bound(value, names, at, legal) for names in (LOWER, UPPER))
    if lower and upper and isinstance(lower.value, str) != isinstance(upper.value, str):
        raise InvalidFilter("the bounds of a range must be two numbers or two strings", pointer=at)
    return Range(lower, upper)


def _bound(value: dict[str, object], names: tuple[str, str], at: str, legal: str) -> Bound | None:
    given = [name for name in names if name in value]
    if len(given) > 1:
        raise InvalidFilter(f"{' and '.join(given)} cannot be used together; {legal}", pointer=at)
    if not given:
        return None
    end = _scalar(value[given[0]], f"{at}/{given[0]}")
    if end is None or isinstance(end, bool):
        raise InvalidFilter(f"a bound must be a number or a string, not {_named(end)}", pointer=f"{at}/{given[0]}")
    return Bound(end, closed=given[0].endswith("e"))


def _scalar(value: object, at: str) -> Scalar:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidFilter("a number must be finite (float64)", pointer=at)
    if value is not None and not isinstance(value, (str, int, float)):
        raise InvalidFilter(f"a value must be a string, a number, true, false or null, not {_named(value)}", pointer=at)
    return _whole(value, at) if isinstance(value, str) else value


def _whole(text: str, at: str) -> str:
    """Return a text; raise InvalidFilter if it has half of a surrogate pair, which cannot be compared."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidFilter("a string has half of a surrogate pair", pointer=at) from None
    return text


def _listed(value: object, at: str) -> list[object]:
    if not isinstance(value, list) or not value:
        raise InvalidFilter(f"{at.rpartition('/')[2]} must be a list of at least one element", pointer=at)
    return value


def _named(value: object) -> str:
    """The JSON name of a value's type."""
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


JOINS = ("and", "or", "not")
LOWER = ("gt", "gte")
UPPER = ("lt", "lte")
OPERATORS: dict[str, Callable[[object, str], Test]] = {
    "eq": _equal,
    "in": _one_of,
    "range": _range,
    "prefix": _prefix,
    "exists": _exists,
}
SHAPE = 'legal: {"field": .., one of ' + ", ".join(OPERATORS) + '}, {"and": [..]}, {"or": [..]}, {"not": ..}'
