"""`Metadata`: the metadata of the items of one gallery, in memory, for matches and filters.

Every item has a slot, a small number; `filter_mask` evaluates a filter for all slots at once, faster than a scan. An
item whose metadata or id changes gets another slot, so that columns are append-only; once many slots are retired, they
are dropped from the columns and reused. Unchanged metadata are recognised by their JSON text, without parsing it.

The columns of a key are built by the first filter that needs them, and every later write adds its values: many
galleries are never filtered, and few by all keys. So a start parses no JSON.

Not thread-safe: the gallery locks (`filter_mask` may run concurrently). Shape suffixes: S slots, N items.
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

from index.contents import Contents
from index.garbage_collection import gc_paused
from index.item_table import KEY, NO_ITEM, ItemTable, JoinedTexts, joined_texts, texts_of
from index.metadata.columns import Mask
from index.metadata.fields import Field, add_documents, deepest_first
from index.metadata.filter import And, Condition, Exists, Filter, Not, Or, Test, keys_of

Slots = NDArray[np.int64]

EMPTY_JSON = "{}"
"""The metadata of an item without any."""
SLOT_BYTES = 198
"""Bytes of an item without its texts: its entry in `_slot_of` with two Python ints, and its row in the table."""
LOAD_BATCH = 65_536
"""Keys loaded in one step, which holds the GIL for some milliseconds."""
COLUMN_BATCH = 4_096
"""Items added to columns in one step, which takes some ten milliseconds."""
AS_ZEROS, LONG_NUMBER = bytes.maketrans(b"123456789", b"000000000"), b"0" * 19
"""With all digits replaced by zeros, one search finds integers that may exceed 64 bits."""
MIN_RETIRED = 1024
"""Retired slots are reused once there are this many, and half as many as items."""


class Item(NamedTuple):
    """An item without its vector.

    Attributes:
        metadata: a JSON object as text.
        id: the id that the user gave it.
        seq: the change feed number of its last write.
    """

    metadata: str = EMPTY_JSON
    id: str = ""
    seq: int = 0


EMPTY_ITEM = Item()


class FoundItems(Mapping[int, Item]):
    """Items by key, as they were when they were found; each is decoded on access."""

    def __init__(self, rows_N5: Slots, memory: bytearray) -> None:
        """See `ItemTable.rows`."""
        self._rows_N5, self._memory = rows_N5, memory

    def __getitem__(self, key: int) -> Item:
        """One of the items."""
        _, seq, first, second, end = self._rows[key]
        return Item(self._memory[first:second].decode(), self._memory[second:end].decode(), seq)

    def __iter__(self) -> Iterator[int]:
        """The keys."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Number of items."""
        return len(self._rows)

    @cached_property
    def _rows(self) -> dict[int, list[int]]:
        # Built on first access: a deep page reads few of the items that were ranked for it.
        return {row[KEY]: row for row in self._rows_N5.tolist()}


class ItemChanges(NamedTuple):
    """Changes of some items, computed by `Metadata.diff`.

    Attributes:
        keys: the items that get a new slot, because they are new, or their metadata or id changed (N,).
        texts: their metadata and ids.
        seqs: the feed numbers of their last writes.
        same: slots of unchanged items, and the feed numbers of their last writes.
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
        # The two texts of an item are its metadata (JSON) and its id.
        self._table = ItemTable()
        # Keys whose columns hold every item; and the keys of all items, known once all were parsed for a filter.
        self._built_keys: frozenset[str] = frozenset()
        self._keys: set[str] = set()
        self._keys_known = False
        # Keys whose columns are being built, and the number of slots that were added to them.
        self._building_keys: frozenset[str] = frozenset()
        self._built_slots = 0
        self._free: list[int] = []
        self._retired: list[int] = []

    def put(self, keys: Sequence[int], items: Mapping[int, Item]) -> Slots:
        """Store items, replacing earlier ones; returns their slots (N,). See `diff`."""
        self.apply(self.diff(keys, items))
        return self.slots_of(keys)

    def diff(self, keys: Sequence[int], items: Mapping[int, Item]) -> ItemChanges:
        """Compute the changes for `apply`, which is most of the work. Readers may run concurrently, writers not.

        Args:
            keys: distinct.
            items: by key. An item that is not in it keeps its metadata, or has none if new.
        """
        slots, new = list(map(self._slot_of.get, keys)), []
        same: tuple[list[int], list[int]] = [], []
        known = [slot for slot in slots if slot is not None]
        rows_N5 = self._table.rows(np.array(known, np.int64))
        before = iter(texts_of(rows_N5, self._table.memory))
        for key, slot, item in zip(keys, slots, map(items.get, keys), strict=True):
            if slot is None:
                new.append((key, item or EMPTY_ITEM))
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

    def apply(self, changes: ItemChanges) -> None:
        """Store the changes that `diff` computed."""
        slots, seqs = changes.same
        if slots:
            self._table.stamp(slots, seqs)
        if changes.keys:
            self._store(changes.keys, changes.texts, changes.seqs)

    def keys(self) -> list[int]:
        """The keys of all items, unordered."""
        return list(self._slot_of)

    def slots_of(self, keys: Sequence[int]) -> Slots:
        """The slots of existing items (N,)."""
        return np.fromiter(map(self._slot_of.__getitem__, keys), np.int64, len(keys))

    def load(self, items: Contents) -> Slots:
        """Store new items; returns their slots (N,)."""
        before, keys = self._table.slot_count(), items.keys_N
        self._table.load(keys, items.seqs_N, items.texts, items.text_offsets_N3)
        for start in range(0, len(keys), LOAD_BATCH):
            block = keys[start : start + LOAD_BATCH].tolist()
            self._slot_of.update(zip(block, range(before + start, before + start + len(block)), strict=True))
        return np.arange(before, before + len(keys))

    def contents(self) -> Contents:
        """The argument of `load` for all slots (S,), without embeddings."""
        return Contents(*self._table.copy_columns(), {})

    def slot_count(self) -> int:
        """Number of slots, S."""
        return self._table.slot_count()

    def seqs(self, slots_N: Slots) -> Slots:
        """The feed numbers of the last writes of the items in these slots (N,)."""
        return self._table.seqs(slots_N)

    def bytes(self) -> int:
        """Approximate memory in bytes: rows, texts, and columns, which take about as much as the texts."""
        return (1 + bool(self._built_keys)) * self._table.text_bytes() + self._table.slot_count() * SLOT_BYTES

    def get(self, key: int) -> Item | None:
        """An item; None: no such item."""
        slot = self._slot_of.get(key)
        return None if slot is None else Item(*self._table.texts(slot), self._table.seq(slot))

    def look_up(self, slots_QK: Slots, *, full: bool) -> tuple[Slots, FoundItems]:
        """The keys (Q, K) of the items in these slots, and the items, which later writes do not change.

        Slots may be NO_ITEM, whose key is NO_ITEM too, unless `full` (the faster way).
        """
        if full:
            rows_N5 = self._table.rows(slots_QK.ravel())
            return rows_N5[:, KEY].reshape(slots_QK.shape), FoundItems(rows_N5, self._table.memory)
        there_QK = slots_QK != NO_ITEM
        keys_QK, rows_N5 = np.full(slots_QK.shape, NO_ITEM), self._table.rows(slots_QK[there_QK])
        keys_QK[there_QK] = rows_N5[:, KEY]
        return keys_QK, FoundItems(rows_N5, self._table.memory)

    def remove(self, keys: Iterable[int]) -> None:
        """Remove items; unknown ones are ignored."""
        for key in keys:
            if (slot := self._slot_of.pop(key, None)) is not None:
                self._retire(slot)
        self._reuse_retired()

    def select(self, where: Filter) -> Mask:
        """`filter_mask` for a caller with exclusive access: builds missing columns first."""
        while not self.filterable(where):
            self.build_columns(where)
        return self.filter_mask(where)

    def filter_mask(self, where: Filter) -> Mask:
        """Whether the item of each slot (S,) passes a `filterable` filter; undefined for free slots."""
        match where:
            case Condition(path, test):
                return self._test(path, test)
            case Not(part):
                return ~self.filter_mask(part)
            case And(parts):
                return reduce(np.logical_and, map(self.filter_mask, parts))
            case Or(parts):
                return reduce(np.logical_or, map(self.filter_mask, parts))

    def filterable(self, where: Filter) -> bool:
        """Whether the columns that a filter tests hold every item; stays True until a write adds a new key."""
        return self._keys_known and keys_of(where) & self._keys <= self._built_keys

    def build_columns(self, where: Filter) -> None:
        """Add the next items to the columns that a filter tests, or to those being built for an earlier filter."""
        if self.filterable(where):
            return
        if not self._building_keys:
            asked = keys_of(where) - self._built_keys
            self._building_keys, self._built_slots = asked & self._keys if self._keys_known else asked, 0
        start, self._built_slots = self._built_slots, min(self._built_slots + COLUMN_BATCH, self._table.slot_count())
        with gc_paused():
            self._add_to_columns(range(start, self._built_slots), self._building_keys)
        if self._built_slots == self._table.slot_count():
            self._built_keys, self._building_keys, self._keys_known = (
                self._built_keys | self._building_keys,
                frozenset(),
                True,
            )

    def _test(self, path: tuple[str, ...], test: Test) -> Mask:
        selected_S = np.zeros(self._table.slot_count(), np.bool_)
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
        before, added = self._table.slot_count(), len(keys) - len(again)
        slots = [*again, *range(before, before + added)]
        self._table.add(keys, seqs, texts, again)
        self._slot_of.update(zip(keys, slots, strict=True))
        if self._keys_known:
            self._add_to_columns(slots, self._built_keys)
        if self._building_keys:
            self._add_to_columns([slot for slot in slots if slot < self._built_slots], self._building_keys)
        self._reuse_retired()

    def _retire(self, slot: int) -> None:
        self._table.free(slot)
        self._retired.append(slot)

    def _add_to_columns(self, slots: Sequence[int], keys: Iterable[str]) -> None:
        """Add the items at these slots, some of which may be retired, to the columns of some keys."""
        held, texts = self._table.first_texts(slots)
        if held:
            # Parse them as one text: parsing each would take several times as long.
            documents = _parsed(b"[%s]" % texts)
            self._keys.update(*documents)
            add_documents(self._root, held, documents, keys)

    def _reuse_retired(self) -> None:
        """Once many slots are retired, drop them from the columns and make them free."""
        if len(self._retired) < max(MIN_RETIRED, len(self._slot_of) // 2):
            return
        kept_S = np.ones(self._table.slot_count(), np.bool_)
        kept_S[self._retired] = False
        for field in deepest_first(self._root):
            field.keep(kept_S)
        self._free += self._retired
        self._retired = []


def _parsed(text: bytes) -> list[dict[str, Any]]:
    """Parse JSON documents, by orjson (faster) unless it would round integers beyond 64 bits or refuse surrogates."""
    documents: list[dict[str, Any]]
    if LONG_NUMBER not in text.translate(AS_ZEROS):
        with suppress(orjson.JSONDecodeError):
            documents = orjson.loads(text)
            return documents
    documents = json.loads(text)
    return documents
