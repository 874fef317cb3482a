"""Metadata: what the items of one gallery hold beside their vectors, in memory: shown with a match, and filtered by.

Every item has a slot, a small number; `passing` answers a filter for all slots at once, for less than a scan costs. An
item whose metadata or id changes gets another slot, so that columns only grow; retired slots are swept out and used
again when there are many of them. An item whose metadata did not change is recognised by its JSON, without reading it.

Columns are made of the keys that a filter looks at when the first one comes that does: many galleries are never
filtered, and few by all there is; a start reads no JSON. From then on every write enters what it brings.

Not thread-safe: the gallery locks around it (`passing` may run beside itself). Shape suffixes: S slots, N items.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from index.columns import Mask
from index.contents import Contents
from index.fields import Field, deepest_first, enter
from index.filter import And, Condition, Exists, Filter, Not, Or, Test, keys_of
from index.garbage_collection import gc_paused
from index.kept_items import KEY, NOBODY, JoinedTexts, KeptItems, joined_texts, texts_of

Slots = NDArray[np.int64]

EMPTY = "{}"
"""The metadata of an item that came without."""
SLOT_BYTES = 198
"""Of an item beside its texts: its entry by key with two numbers of Python's own, and five numbers by slot."""
LOADED_TOGETHER = 65_536
"""So many keys are entered in one step of some milliseconds, in which no other thread computes."""
ENTERED_TOGETHER = 4_096
"""So many items are entered in one step, in some ten milliseconds."""
AS_ZEROS, LONG_NUMBER = bytes.maketrans(b"123456789", b"000000000"), b"0" * 19
"""With all digits as zeros, integers that may take more than 64 bits are found at once."""
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


class FoundItems(Mapping[int, Item]):
    """Some items by key, as they were when they were found; each is made of what is kept when somebody looks at it."""

    def __init__(self, rows_N5: Slots, memory: bytearray) -> None:
        """See `KeptItems.rows`."""
        self._rows_N5, self._memory = rows_N5, memory

    def __getitem__(self, key: int) -> Item:
        """What is known of one of them."""
        _, seq, first, second, end = self._rows[key]
        return Item(self._memory[first:second].decode(), self._memory[second:end].decode(), seq)

    def __iter__(self) -> Iterator[int]:
        """Their keys."""
        return iter(self._rows)

    def __len__(self) -> int:
        """How many they are."""
        return len(self._rows)

    @cached_property
    def _rows(self) -> dict[int, list[int]]:
        # A deep page looks at few of those that were ranked for it.
        return {row[KEY]: row for row in self._rows_N5.tolist()}


class ItemChanges(NamedTuple):
    """What is known of some items beside what was known before, worked out by `Metadata.compare`.

    Attributes:
        keys: of the items that get another slot, because they are new, or their metadata or id changed (N,).
        texts: the metadata and ids of those.
        seqs: the numbers of their last writes.
        same: slots of items that hold what they held, and the numbers of their last writes.
    """

    keys: Sequence[int]
    texts: JoinedTexts
    seqs: Sequence[int]
    same: tuple[Sequence[int], Sequence[int]]


class Metadata:
    """The metadata of a gallery's items."""

    def __init__(self) -> None:
        self._root = Field()
        self._slot_of: dict[int, int] = {}
        # The texts are JSON and id.
        self._kept = KeptItems()
        # Keys of metadata by which every item is found, and of all items, once they were looked through for the first.
        self._entered: frozenset[str] = frozenset()
        self._keys: set[str] = set()
        self._read = False
        # Keys that the items at the slots before this one are entered by.
        self._entering: frozenset[str] = frozenset()
        self._place = 0
        self._free: list[int] = []
        self._retired: list[int] = []

    def put(self, keys: Sequence[int], items: Mapping[int, Item]) -> Slots:
        """Store what is known of items, replacing what was, and return their slots (N,); see `compare`."""
        self.take(self.compare(keys, items))
        return self.slots_of(keys)

    def compare(self, keys: Sequence[int], items: Mapping[int, Item]) -> ItemChanges:
        """What `take` is to do, which is most of the work; beside those who read, while nobody else writes.

        Args:
            keys: all different.
            items: by key. One that is left out keeps what it has, at first nothing.
        """
        slots, new = list(map(self._slot_of.get, keys)), []
        same: tuple[list[int], list[int]] = [], []
        known = [slot for slot in slots if slot is not None]
        rows_N5 = self._kept.rows(np.array(known, np.int64))
        before = iter(texts_of(rows_N5, self._kept.memory))
        for key, slot, item in zip(keys, slots, map(items.get, keys), strict=True):
            if slot is None:
                new.append((key, item or NOTHING))
                continue
            held = next(before)
            if item is None:
                continue
            if (item.metadata, item.id) != held:
                new.append((key, item))
                continue
            same[0].append(slot)
            same[1].append(item.seq)
        texts = joined_texts([item.metadata.encode() for _, item in new], [item.id.encode() for _, item in new])
        return ItemChanges([key for key, _ in new], texts, [item.seq for _, item in new], same)

    def take(self, changes: ItemChanges) -> None:
        """Store what was found to have changed."""
        slots, seqs = changes.same
        if slots:
            self._kept.stamp(slots, seqs)
        if changes.keys:
            self._store(changes.keys, changes.texts, changes.seqs)

    def keys(self) -> list[int]:
        """The keys of all items, in no order."""
        return list(self._slot_of)

    def slots_of(self, keys: Sequence[int]) -> Slots:
        """The slots of items that are there (N,)."""
        return np.fromiter(map(self._slot_of.__getitem__, keys), np.int64, len(keys))

    def load(self, items: Contents) -> Slots:
        """Store what is known of items that are not there yet, and return their slots (N,)."""
        before, keys = self._kept.slots(), items.keys_N
        self._kept.load(keys, items.seqs_N, items.texts, items.places_N3)
        for start in range(0, len(keys), LOADED_TOGETHER):
            block = keys[start : start + LOADED_TOGETHER].tolist()
            self._slot_of.update(zip(block, range(before + start, before + start + len(block)), strict=True))
        return np.arange(before, before + len(keys))

    def copied(self) -> Contents:
        """What `load` takes, without what items hold, of all slots (S,)."""
        return Contents(*self._kept.copied(), {})

    def slots(self) -> int:
        """How many slots there are, S."""
        return self._kept.slots()

    def seqs(self, slots_N: Slots) -> Slots:
        """The numbers of the last writes of the items that hold these slots (N,)."""
        return self._kept.seqs(slots_N)

    def bytes(self) -> int:
        """Roughly what it takes of memory: texts, and the values that filters test, which are about as much again."""
        return (1 + bool(self._entered)) * self._kept.size() + self._kept.slots() * SLOT_BYTES

    def get(self, key: int) -> Item | None:
        """What is known of an item, None where there is no such item."""
        slot = self._slot_of.get(key)
        return None if slot is None else Item(*self._kept.both(slot), self._kept.seq(slot))

    def found(self, slots_QK: Slots, *, full: bool) -> tuple[Slots, FoundItems]:
        """The keys (Q, K) of the items that hold these slots, and what is known of them, whatever is written later.

        `full`: no slot is NOBODY; those that are get NOBODY as keys.
        """
        if full:
            rows_N5 = self._kept.rows(slots_QK.ravel())
            return rows_N5[:, KEY].reshape(slots_QK.shape), FoundItems(rows_N5, self._kept.memory)
        there_QK = slots_QK != NOBODY
        keys_QK, rows_N5 = np.full(slots_QK.shape, NOBODY), self._kept.rows(slots_QK[there_QK])
        keys_QK[there_QK] = rows_N5[:, KEY]
        return keys_QK, FoundItems(rows_N5, self._kept.memory)

    def drop(self, keys: Iterable[int]) -> None:
        """Forget items; unknown ones are ignored."""
        for key in keys:
            if (slot := self._slot_of.pop(key, None)) is not None:
                self._retire(slot)
        self._sweep()

    def select(self, where: Filter) -> Mask:
        """`passing`, for whoever has it alone: what `enter` has left is entered."""
        while not self.filterable(where):
            self.enter(where)
        return self.passing(where)

    def passing(self, where: Filter) -> Mask:
        """Which items pass what is `filterable`, by slot (S,); about slots that no item holds it says nothing."""
        match where:
            case Condition(path, test):
                return self._test(path, test)
            case Not(part):
                return ~self.passing(part)
            case And(parts):
                return reduce(np.logical_and, map(self.passing, parts))
            case Or(parts):
                return reduce(np.logical_or, map(self.passing, parts))

    def filterable(self, where: Filter) -> bool:
        """Whether a filter finds every item; once it does, it finds what is written later too."""
        return self._read and keys_of(where) & self._keys <= self._entered

    def enter(self, where: Filter) -> None:
        """Have a filter find some more of the items; or first others that came before."""
        if self.filterable(where):
            return
        if not self._entering:
            asked = keys_of(where) - self._entered
            self._entering, self._place = asked & self._keys if self._read else asked, 0
        start, self._place = self._place, min(self._place + ENTERED_TOGETHER, self._kept.slots())
        with gc_paused():
            self._enter(range(start, self._place), self._entering)
        if self._place == self._kept.slots():
            self._entered, self._entering, self._read = self._entered | self._entering, frozenset(), True

    def _test(self, path: tuple[str, ...], test: Test) -> Mask:
        selected_S = np.zeros(self._kept.slots(), np.bool_)
        field: Field | None = self._root
        for key in path:
            field = field and field.children.get(key)
        if field is not None:
            field.select(test, selected_S)
        return ~selected_S if isinstance(test, Exists) and not test.wanted else selected_S

    def _store(self, keys: Sequence[int], texts: JoinedTexts, seqs: Sequence[int]) -> None:
        """Give items new slots."""
        for before in map(self._slot_of.get, keys):
            if before is not None:
                self._retire(before)
        again = [self._free.pop() for _ in range(min(len(keys), len(self._free)))]
        before, added = self._kept.slots(), len(keys) - len(again)
        slots = [*again, *range(before, before + added)]
        self._kept.add(keys, seqs, texts, again)
        self._slot_of.update(zip(keys, slots, strict=True))
        if self._read:
            self._enter(slots, self._entered)
        if self._entering:
            self._enter([slot for slot in slots if slot < self._place], self._entering)
        self._sweep()

    def _retire(self, slot: int) -> None:
        self._kept.free(slot)
        self._retired.append(slot)

    def _enter(self, slots: Sequence[int], keys: Iterable[str]) -> None:
        """Enter what is at these slots, of which some may be retired, by some keys."""
        held, texts = self._kept.firsts(slots)
        if held:
            # As one text: many small ones cost several times as much.
            documents = _parsed(b"[%s]" % texts)
            self._keys.update(*documents)
            enter(self._root, held, documents, keys)

    def _sweep(self) -> None:
        """Drop the entries of retired slots once there are many, and use those slots again."""
        if len(self._retired) < max(MIN_RETIRED, len(self._slot_of) // 2):
            return
        kept_S = np.ones(self._kept.slots(), np.bool_)
        kept_S[self._retired] = False
        for field in deepest_first(self._root):
            field.keep(kept_S)
        self._free += self._retired
        self._retired = []


def _parsed(text: bytes) -> list[dict[str, Any]]:
    """JSON documents; orjson, which is faster, would round integers beyond 64 bits, and refuses half characters."""
    documents: list[dict[str, Any]]
    if LONG_NUMBER not in text.translate(AS_ZEROS):
        with suppress(orjson.JSONDecodeError):
            documents = orjson.loads(text)
            return documents
    documents = json.loads(text)
    return documents
