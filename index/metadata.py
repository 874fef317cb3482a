"""Metadata: what the items of one gallery hold beside their vectors, in memory: shown with a match, and filtered by.

Every item has a slot, a small number; `select` answers a filter for all slots at once, for less than a scan costs. An
item whose metadata changes gets another slot, so that columns only grow; retired slots are swept out and used again
when there are many of them. An item whose metadata did not change is recognised by its JSON, without reading it.

Not thread-safe: the gallery locks around it (`select` may run beside itself). Shape suffixes: S slots, N items.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import repeat
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from index.columns import CONTAINER, BigIntColumn, Mask, Number, Numbers, StringColumn, is_wide, none_is_wide, successor
from index.filter import And, Bound, Condition, Exists, Filter, Not, OneOf, Or, Prefix, Range, Scalar, Test

Slots = NDArray[np.int64]

EMPTY = "{}"
"""The metadata of an item that came without."""
NUMBERS = frozenset((int, float))
NESTED = frozenset((dict, list))
SLOT_BYTES = 320
"""Of an item beside its JSON: its entry by key, its id, two objects' heads, numbers and pointers."""
MIN_RETIRED = 1024
"""So many retired slots are worth a sweep, or as many as half of those in use."""


class Item(NamedTuple):
    """What is known of an item beside its vector.

    Attributes:
        metadata: a JSON object as text.
        id: what its user calls it.
        seq: the number of its last write in the gallery's change feed.
    """

    metadata: str = EMPTY
    id: str = ""
    seq: int = 0


NOTHING = Item()


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


Values = dict[Field, tuple[list[int], list[Scalar]]]
"""Slots, and the value at each, by field."""


class Metadata:
    """The metadata of a gallery's items."""

    def __init__(self) -> None:
        self._root = Field()
        self._slot_of: dict[int, int] = {}
        # UTF-8, which takes less room than text. A retired slot keeps nothing.
        self._json_S: list[bytes] = []
        self._id_S: list[str] = []
        self._seq_S = array("q")
        self._text_bytes = 0
        self._free: list[int] = []
        self._retired: list[int] = []

    def put(self, keys: Sequence[int], items: Mapping[int, Item]) -> Slots:
        """Store what is known of items, replacing what was, and return their slots (N,).

        Args:
            keys: all different.
            items: by key. One that is left out keeps what it has, at first nothing.
        """
        if self._slot_of.keys().isdisjoint(keys):  # as in a gallery that is loaded
            return self._store(keys, [items.get(key, NOTHING) for key in keys])
        changed: list[tuple[int, Item]] = []
        for key, slot in zip(keys, map(self._slot_of.get, keys), strict=True):
            item = items.get(key)
            if item is None:
                if slot is not None:
                    continue
                item = NOTHING
            text = item.metadata.encode()
            if slot is not None and self._json_S[slot] == text:
                self._id_S[slot], self._seq_S[slot] = item.id, item.seq
            else:
                changed.append((key, item))
        if changed:
            self._store(*zip(*changed, strict=True))
        return np.fromiter(map(self._slot_of.__getitem__, keys), np.int64, len(keys))

    def slots(self) -> int:
        """How many slots there are, S."""
        return len(self._seq_S)

    def bytes(self) -> int:
        """Roughly what it takes of memory: JSON, and the values that filters test, which are about as much again."""
        return 2 * self._text_bytes + len(self._seq_S) * SLOT_BYTES

    def get(self, key: int) -> Item | None:
        """What is known of an item, None where there is no such item."""
        slot = self._slot_of.get(key)
        return None if slot is None else Item(self._json_S[slot].decode(), self._id_S[slot], self._seq_S[slot])

    def of(self, keys: Iterable[int]) -> dict[int, Item]:
        """What is known of items, by key; unknown ones are left out."""
        slot_of, json_S, id_S, seq_S, found = self._slot_of, self._json_S, self._id_S, self._seq_S, {}
        for key in keys:
            if (slot := slot_of.get(key)) is not None:
                found[key] = Item(json_S[slot].decode(), id_S[slot], seq_S[slot])
        return found

    def drop(self, keys: Iterable[int]) -> None:
        """Forget items; unknown ones are ignored."""
        for key in keys:
            if (slot := self._slot_of.pop(key, None)) is not None:
                self._retire(slot)
        self._sweep()

    def select(self, where: Filter) -> Mask:
        """Which items pass, by slot (S,); what it says about slots that no item holds means nothing."""
        match where:
            case Condition(path, test):
                return self._test(path, test)
            case Not(part):
                return ~self.select(part)
            case And(parts):
                return reduce(np.logical_and, map(self.select, parts))
            case Or(parts):
                return reduce(np.logical_or, map(self.select, parts))

    def _test(self, path: tuple[str, ...], test: Test) -> Mask:
        selected_S = np.zeros(len(self._seq_S), np.bool_)
        field: Field | None = self._root
        for key in path:
            field = field and field.children.get(key)
        if field is not None:
            field.select(test, selected_S)
        return ~selected_S if isinstance(test, Exists) and not test.wanted else selected_S

    def _store(self, keys: Sequence[int], items: Sequence[Item]) -> Slots:
        """Give items new slots (N,)."""
        for before in map(self._slot_of.get, keys):
            if before is not None:
                self._retire(before)
        texts, ids, seqs = [i.metadata.encode() for i in items], [i.id for i in items], [i.seq for i in items]
        again = [self._free.pop() for _ in range(min(len(keys), len(self._free)))]
        for slot, text, name, seq in zip(again, texts, ids, seqs, strict=False):
            self._json_S[slot], self._id_S[slot], self._seq_S[slot] = text, name, seq
        slots = [*again, *range(len(self._seq_S), len(self._seq_S) + len(keys) - len(again))]
        self._json_S += texts[len(again) :]
        self._id_S += ids[len(again) :]
        self._seq_S.extend(seqs[len(again) :])
        self._slot_of.update(zip(keys, slots, strict=True))
        self._text_bytes += sum(map(len, texts))
        # As one text: many small ones cost several times as much.
        self._enter(slots, json.loads(b"[%s]" % b",".join(texts)))
        self._sweep()
        return np.array(slots, np.int64)

    def _retire(self, slot: int) -> None:
        self._text_bytes -= len(self._json_S[slot])
        self._json_S[slot], self._id_S[slot] = b"", ""
        self._retired.append(slot)

    def _enter(self, slots: Sequence[int], documents: Sequence[dict[str, Any]]) -> None:
        """Enter every value of documents, field by field."""
        values: Values = defaultdict(lambda: ([], []))
        nested: list[tuple[int, Field, Any]] = []
        # Documents with the same keys are read a column at a time: a gallery that is loaded has many.
        alike: dict[tuple[str, ...], tuple[list[int], list[dict[str, Any]]]] = defaultdict(lambda: ([], []))
        for slot, document, shape in zip(slots, documents, map(tuple, documents), strict=True):
            there, those = alike[shape]
            there.append(slot)
            those.append(document)
        for shape, (there, those) in alike.items():
            for key, column in zip(shape, zip(*map(dict.values, those), strict=True), strict=True):
                field = self._root.child(key)
                if NESTED.isdisjoint(map(type, column)):
                    values[field][0].extend(there)
                    values[field][1].extend(column)
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

    def _sweep(self) -> None:
        """Drop the entries of retired slots once there are many, and use those slots again."""
        if len(self._retired) < max(MIN_RETIRED, len(self._slot_of) // 2):
            return
        kept_S = np.ones(len(self._seq_S), np.bool_)
        kept_S[self._retired] = False
        for field in self._deepest_first():
            field.keep(kept_S)
        self._free += self._retired
        self._retired = []

    def _deepest_first(self) -> list[Field]:
        found, remaining = [], [self._root]
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
