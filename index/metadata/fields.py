"""`Field`: the values of JSON documents at one path of object keys, in columns that filters test.

Not thread-safe. Shape suffixes: S slots, N items.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, cast

import numpy as np

from index.metadata.columns import (
    CONTAINER,
    BigIntColumn,
    Mask,
    Number,
    NumberColumn,
    StringColumn,
    all_exact,
    is_inexact,
    successor,
)
from index.metadata.filter import Bound, Exists, OneOf, Prefix, Range, Scalar, Test

NUMBERS = frozenset((int, float))
NESTED = frozenset((dict, list))


class Field:
    """The values at one path of object keys; `children` are the fields whose path is one key longer."""

    __slots__ = ("big_ints", "children", "numbers", "strings")

    def __init__(self) -> None:
        self.children: dict[str, Field] = {}
        # Created on the first value of their type: a gallery may have many fields.
        self.strings: StringColumn | None = None
        self.numbers: NumberColumn | None = None
        self.big_ints: BigIntColumn | None = None

    def add(self, slots: Sequence[int], values: Sequence[Scalar]) -> None:
        """Add the values (N,) of this field for the items at `slots` (N,)."""
        kinds = set(map(type, values))
        if kinds <= NUMBERS:
            self._add_numbers(slots, cast("Sequence[Number]", values))
        elif kinds.isdisjoint(NUMBERS):
            self._strings().add(slots, cast("Sequence[str | bool | None]", values))
        else:
            for numeric in (True, False):
                mine = [pair for pair in zip(slots, values, strict=True) if (type(pair[1]) in NUMBERS) is numeric]
                self.add(*map(list, zip(*mine, strict=True)))

    def add_containers(self, slots: Sequence[int]) -> None:
        """Record that the items at `slots` have an object or an empty list in this field."""
        self._strings().extend(slots, [CONTAINER] * len(slots))

    def _strings(self) -> StringColumn:
        if self.strings is None:
            self.strings = StringColumn()
        return self.strings

    def _add_numbers(self, slots: Sequence[int], values: Sequence[Number]) -> None:
        if not all_exact(values):
            big_ints = [pair for pair in zip(slots, values, strict=True) if is_inexact(pair[1])]
            if big_ints:
                self.big_ints = self.big_ints or BigIntColumn()
                self.big_ints.extend(*map(list, zip(*big_ints, strict=True)))
            rest = [pair for pair in zip(slots, values, strict=True) if not is_inexact(pair[1])]
            if not rest:
                return
            slots, values = map(list, zip(*rest, strict=True))
        self.numbers = self.numbers or NumberColumn()
        self.numbers.extend(slots, values)

    def child(self, key: str) -> Field:
        """The child field of a key, created if needed."""
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = Field()
        return found

    def keep(self, kept_S: Mask) -> None:
        """Drop the slots that are not in `kept_S`, and children without values."""
        for table in self.columns():
            table.keep(kept_S)
        self.children = {key: child for key, child in self.children.items() if not child.empty()}

    def empty(self) -> bool:
        """Whether no item has this field or one below."""
        return not self.children and not any(table.count() for table in self.columns())

    def columns(self) -> Iterator[StringColumn | NumberColumn | BigIntColumn]:
        """The columns that exist."""
        return (table for table in (self.strings, self.numbers, self.big_ints) if table is not None)

    def select(self, test: Test, into_S: Mask) -> None:
        """Set the slots of the items that pass a test."""
        match test:
            case OneOf(values):
                self._one_of(values, into_S)
            case Prefix(text):
                end = successor(text)
                upper = None if end is None else Bound(end, closed=False)
                self._inside(Bound(text, closed=True), upper, into_S)
            case Range(lower, upper):
                self._inside(lower, upper, into_S)
            case Exists():
                for table in self.columns():
                    table.mark_all(into_S)

    def _one_of(self, values: Sequence[Scalar], into_S: Mask) -> None:
        if self.strings is not None:
            self.strings.mark_equal([v for v in values if v is None or isinstance(v, (str, bool))], into_S)
        numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        for table in (self.numbers, self.big_ints):
            if table is not None:
                table.mark_equal(numbers, into_S)

    def _inside(self, lower: Bound | None, upper: Bound | None, into_S: Mask) -> None:
        strings = any(bound is not None and isinstance(bound.value, str) for bound in (lower, upper))
        for table in (self.strings,) if strings else (self.numbers, self.big_ints):
            if table is not None:
                table.mark_inside(lower, upper, into_S)


ABSENT = object()

Values = dict[Field, tuple[list[int], list[Scalar]]]
"""Field -> slots, and the value of each."""


def add_documents(root: Field, slots: Sequence[int], documents: Sequence[dict[str, Any]], keys: Iterable[str]) -> None:
    """Add the values under some keys of the documents (N,) for the items at `slots` (N,)."""
    values: Values = defaultdict(lambda: ([], []))
    nested: list[tuple[int, Field, Any]] = []
    for key in keys:
        there, column = list(slots), [document.get(key, ABSENT) for document in documents]
        kinds = set(map(type, column))
        if object in kinds:
            there = [slot for slot, value in zip(slots, column, strict=True) if value is not ABSENT]
            column = [value for value in column if value is not ABSENT]
        if not column:
            continue
        field = root.child(key)
        if NESTED.isdisjoint(kinds):
            values[field] = there, column
        else:
            nested += zip(there, repeat(field), column)
    containers = _collect_nested(nested, values)
    for field, entries in values.items():
        field.add(*_sort_by_slot(*entries))
    for field, holding in containers.items():
        field.add_containers(holding)
    for field in values.keys() | containers.keys():
        for table in field.columns():
            table.flush()


def deepest_first(root: Field) -> list[Field]:
    """A field and all fields below it, deepest first."""
    found, remaining = [], [root]
    while remaining:
        field = remaining.pop()
        found.append(field)
        remaining.extend(field.children.values())
    return found[::-1]


def _sort_by_slot(slots: list[int], values: list[Scalar]) -> tuple[list[int], list[Scalar]]:
    """Entries sorted by slot: filters are fastest on a field that every item has once."""
    if slots == sorted(slots):
        return slots, values
    order = np.argsort(slots, kind="stable").tolist()
    return [slots[n] for n in order], [values[n] for n in order]


def _collect_nested(nested: list[tuple[int, Field, Any]], values: Values) -> dict[Field, list[int]]:
    """Collect the values within objects and lists, without recursion: JSON may be nested beyond Python's limit.

    Returns:
        Field -> the slots of items with an object or an empty list.
    """
    containers: dict[Field, list[int]] = defaultdict(list)
    while nested:
        slot, field, value = nested.pop()
        if isinstance(value, list) and value:
            nested.extend((slot, field, element) for element in value)
        elif isinstance(value, (dict, list)):
            containers[field].append(slot)
            if isinstance(value, dict):
                nested.extend((slot, field.child(key), inner) for key, inner in value.items())
        else:
            there, held = values[field]
            there.append(slot)
            held.append(value)
    return containers
