"""Fields: the values of JSON documents by the path of object keys that leads to them, so that a filter tests a column.

Not thread-safe. Shape suffixes: S slots, N items.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, cast

import numpy as np

from index.columns import CONTAINER, BigIntColumn, Mask, Number, Numbers, StringColumn, is_wide, none_is_wide, successor
from index.filter import Bound, Exists, OneOf, Prefix, Range, Scalar, Test

NUMBERS = frozenset((int, float))
NESTED = frozenset((dict, list))


class Field:
    """The values at the end of one path of object keys; `children` are the fields one key further."""

    __slots__ = ("children", "numbers", "wide", "words")

    def __init__(self) -> None:
        self.children: dict[str, Field] = {}
        # Made when the first value of their kind comes: a gallery may have many fields.
        self.words: StringColumn | None = None
        self.numbers: Numbers | None = None
        self.wide: BigIntColumn | None = None

    def add(self, slots: Sequence[int], values: Sequence[Scalar]) -> None:
        """Note that the items at `slots` (N,) hold these values (N,) here."""
        kinds = set(map(type, values))
        if kinds <= NUMBERS:
            self._add_numbers(slots, cast("Sequence[Number]", values))
        elif kinds.isdisjoint(NUMBERS):
            self._words().add(slots, cast("Sequence[str | bool | None]", values))
        else:
            for numeric in (True, False):
                mine = [pair for pair in zip(slots, values, strict=True) if (type(pair[1]) in NUMBERS) is numeric]
                self.add(*map(list, zip(*mine, strict=True)))

    def add_containers(self, slots: Sequence[int]) -> None:
        """Note that the items at `slots` hold an object or an empty list here."""
        self._words().extend(slots, [CONTAINER] * len(slots))

    def _words(self) -> StringColumn:
        if self.words is None:
            self.words = StringColumn()
        return self.words

    def _add_numbers(self, slots: Sequence[int], values: Sequence[Number]) -> None:
        if not none_is_wide(values):
            wide = [pair for pair in zip(slots, values, strict=True) if is_wide(pair[1])]
            if wide:
                self.wide = self.wide or BigIntColumn()
                self.wide.extend(*map(list, zip(*wide, strict=True)))
            rest = [pair for pair in zip(slots, values, strict=True) if not is_wide(pair[1])]
            if not rest:
                return
            slots, values = map(list, zip(*rest, strict=True))
        self.numbers = self.numbers or Numbers()
        self.numbers.extend(slots, values)

    def child(self, key: str) -> Field:
        """The field one key further, made if there is none."""
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = Field()
        return found

    def keep(self, kept_S: Mask) -> None:
        """Forget all slots but these, and children that hold nothing any more."""
        for table in self.tables():
            table.keep(kept_S)
        self.children = {key: child for key, child in self.children.items() if not child.empty()}

    def empty(self) -> bool:
        """Whether no item has this field or one below."""
        return not self.children and not any(table.count() for table in self.tables())

    def tables(self) -> Iterator[StringColumn | Numbers | BigIntColumn]:
        """Those there are."""
        return (table for table in (self.words, self.numbers, self.wide) if table is not None)

    def select(self, test: Test, into_S: Mask) -> None:
        """Set the slots of the items that pass."""
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
                for table in self.tables():
                    table.mark_all(into_S)

    def _one_of(self, values: Sequence[Scalar], into_S: Mask) -> None:
        if self.words is not None:
            self.words.mark_equal([v for v in values if v is None or isinstance(v, (str, bool))], into_S)
        numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        for table in (self.numbers, self.wide):
            if table is not None:
                table.mark_equal(numbers, into_S)

    def _inside(self, lower: Bound | None, upper: Bound | None, into_S: Mask) -> None:
        words = any(bound is not None and isinstance(bound.value, str) for bound in (lower, upper))
        for table in (self.words,) if words else (self.numbers, self.wide):
            if table is not None:
                table.mark_inside(lower, upper, into_S)


ABSENT = object()

Values = dict[Field, tuple[list[int], list[Scalar]]]
"""Slots, and the value at each, by field."""


def enter(root: Field, slots: Sequence[int], documents: Sequence[dict[str, Any]], keys: Iterable[str]) -> None:
    """Note every value of the documents that items at `slots` (N,) hold under some keys, field by field."""
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
    containers = _walk(nested, values)
    for field, entries in values.items():
        field.add(*_in_order(*entries))
    for field, holding in containers.items():
        field.add_containers(holding)
    for field in values.keys() | containers.keys():
        for table in field.tables():
            table.flush()


def deepest_first(root: Field) -> list[Field]:
    """A field and all below it, the lowest first."""
    found, remaining = [], [root]
    while remaining:
        field = remaining.pop()
        found.append(field)
        remaining.extend(field.children.values())
    return found[::-1]


def _in_order(slots: list[int], values: list[Scalar]) -> tuple[list[int], list[Scalar]]:
    """Entries by their slots: those of a field that every item has once are found fastest."""
    if slots == sorted(slots):
        return slots, values
    order = np.argsort(slots, kind="stable").tolist()
    return [slots[n] for n in order], [values[n] for n in order]


def _walk(nested: list[tuple[int, Field, Any]], values: Values) -> dict[Field, list[int]]:
    """Note the values within objects and lists. A loop: JSON may be nested deeper than Python may call.

    Returns:
        The slots of those that hold an object or an empty list, by field.
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
