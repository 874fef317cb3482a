"""Columns: the values that items hold in one metadata field, laid out so that NumPy tests all of them at once.

A value is an entry: the slot of its item, and what it is. An item with an array has one entry for each element, an
item without the field has none. Strings are numbered by a vocabulary (dictionary encoding), so a test compares each
different string once. Entries are only ever added, until `keep` drops those of slots that nobody holds any more.

Shape suffixes: S slots, E entries, V words of a vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import compress, count, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.filter import Bound

Mask = NDArray[np.bool_]
Number = int | float

NULL, FALSE, TRUE, CONTAINER = range(4)
FIRST_WORD = 4
"""Codes from here on number the words of a vocabulary."""

MOST_EXACT = 2.0**53
"""Every integer up to this one is a float64; the next one rounds to it."""
FEW = 8
"""Up to so many numbers are looked for one after the other."""
BUCKETS = 1 << 16
ORDERED_TOGETHER = 8_192
"""So many words are put in order in one step, of some milliseconds; up to so many new ones wait for it."""


class GrowingArray:
    """A NumPy array that grows. What was appended can be read after `flush`."""

    __slots__ = ("_added", "_array", "_count")

    def __init__(self, dtype: Any) -> None:
        self._array: NDArray[Any] = np.empty(0, dtype)
        self._count = 0
        self._added: list[Any] = []

    def extend(self, values: Iterable[object]) -> None:
        self._added.extend(values)

    def flush(self) -> None:
        after = self._count + len(self._added)
        if after > len(self._array):
            room = np.empty(max(after + after // 2, 4) - self._count, self._array.dtype)
            self._array = np.concatenate([self.values, room])
        self._array[self._count : after] = np.array(self._added, self._array.dtype)
        self._count = after
        self._added = []

    @property
    def values(self) -> NDArray[Any]:
        """Everything flushed, without a copy."""
        return self._array[: self._count]

    @values.setter
    def values(self, values: NDArray[Any]) -> None:
        self._array, self._count = values, len(values)


class Entries:
    """Values of one kind and the slots of the items that hold them."""

    __slots__ = ("_aligned", "_appended", "_slots", "_values")

    def __init__(self, dtype: Any) -> None:
        self._slots = GrowingArray(np.int32)
        self._values = GrowingArray(dtype)
        # Whether entry n is of slot n, as in a gallery whose every item has one value here and never changed.
        self._aligned = True
        self._appended = 0

    def extend(self, slots: Sequence[int], values: Sequence[object]) -> None:
        """Add entries, to be found after `flush`."""
        before, self._appended = self._appended, self._appended + len(slots)
        self._aligned = self._aligned and list(range(before, self._appended)) == slots
        self._slots.extend(slots)
        self._values.extend(values)

    def flush(self) -> None:
        """Make what was appended findable."""
        self._slots.flush()
        self._values.flush()

    def count(self) -> int:
        """How many there are."""
        return len(self._slots.values)

    def keep(self, kept_S: Mask) -> None:
        """Drop the entries of other slots."""
        kept_E = kept_S[self._slots.values]
        self._slots.values = self._slots.values[kept_E]
        self._values.values = self._values.values[kept_E]
        self._appended = self.count()
        self._aligned = bool(np.array_equal(self._slots.values, np.arange(self._appended)))

    def mark_all(self, into_S: Mask) -> None:
        """Set the slots of all entries."""
        into_S[self._slots.values] = True

    def _mark(self, hit_E: Mask, into_S: Mask) -> None:
        """Set the slots of some entries."""
        if self._aligned:
            into_S[: len(hit_E)] |= hit_E
        else:
            into_S[self._slots.values.take(np.flatnonzero(hit_E))] = True


class OrderedWords:
    """Some words of a vocabulary, next to each other by their codes, in order: a range of strings is one of ranks."""

    __slots__ = ("_ordered", "_rank_V")

    def __init__(self, words: Sequence[str]) -> None:
        """`words`: all different, by code."""
        order = sorted(range(len(words)), key=words.__getitem__)
        self._ordered = [words[at] for at in order]
        self._rank_V = np.empty(len(words), np.int32)
        self._rank_V[order] = np.arange(len(words))

    def inside(self, lower: Bound | None, upper: Bound | None) -> Mask:
        """Which of them lie between two strings, by code (V,)."""
        low = 0 if lower is None else _place(self._ordered, lower, before=lower.closed)
        high = len(self._ordered) if upper is None else _place(self._ordered, upper, before=not upper.closed)
        return (self._rank_V >= low) & (self._rank_V < high)


class StringColumn(Entries):
    """Strings, and what is neither string nor number: null, true, false, and that there is a container.

    Words are put in order some at a time; those that wait for it are compared as Python's own: NumPy's end at a NUL.
    """

    __slots__ = ("_code_of", "_ordered", "_waiting")

    def __init__(self) -> None:
        super().__init__(np.int32)
        self._code_of: dict[str, int] = {}
        # By code: the words in order, ORDERED_TOGETHER each, and behind them the newest, which wait for it.
        self._ordered: list[OrderedWords] = []
        self._waiting: list[str] = []

    def add(self, slots: Sequence[int], values: Sequence[str | bool | None]) -> None:
        """Add strings and constants."""
        code_of, before = self._code_of, len(self._code_of)
        self.extend(
            slots,
            [
                code_of.setdefault(value, FIRST_WORD + len(code_of)) if isinstance(value, str) else constant(value)
                for value in values
            ],
        )
        self._waiting += [*islice(reversed(code_of), len(code_of) - before)][::-1]

    def flush(self) -> None:
        super().flush()
        ripe = len(self._waiting) - len(self._waiting) % ORDERED_TOGETHER
        for start in range(0, ripe, ORDERED_TOGETHER):
            self._ordered.append(OrderedWords(self._waiting[start : start + ORDERED_TOGETHER]))
        del self._waiting[:ripe]

    def mark_equal(self, wanted: Sequence[str | bool | None], into_S: Mask) -> None:
        """Set the slots of items that hold one of these."""
        found = (self._code_of.get(value) if isinstance(value, str) else constant(value) for value in wanted)
        codes = [code for code in found if code is not None]
        if len(codes) == 1:
            self._mark(self._values.values == codes[0], into_S)
        elif codes:
            wanted_V = np.zeros(FIRST_WORD + len(self._code_of), np.bool_)
            wanted_V[codes] = True
            self._mark(wanted_V.take(self._values.values), into_S)

    def mark_inside(self, lower: Bound | None, upper: Bound | None, into_S: Mask) -> None:
        """Set the slots of items with a string between two strings."""
        parts = [words.inside(lower, upper) for words in self._ordered]
        waiting_V = _inside(np.array(self._waiting, object), lower, upper)
        wanted_V = np.concatenate([np.zeros(FIRST_WORD, np.bool_), *parts, waiting_V])
        if wanted_V.any():
            self._mark(wanted_V.take(self._values.values), into_S)

    def keep(self, kept_S: Mask) -> None:
        """Drop entries, and the vocabulary's unused words once they are most of it."""
        super().keep(kept_S)
        codes_E = self._values.values
        kept_C = np.zeros(FIRST_WORD + len(self._code_of), np.bool_)
        kept_C[codes_E] = True
        used_V = kept_C[FIRST_WORD:]
        if 2 * np.count_nonzero(used_V) < len(used_V):
            kept_C[:FIRST_WORD] = True
            self._values.values = np.cumsum(kept_C, dtype=np.int32)[codes_E] - 1
            self._waiting = [*compress(self._code_of, used_V.tolist())]  # in the order of their codes
            self._code_of = dict(zip(self._waiting, count(FIRST_WORD), strict=False))
            self._ordered = []
            self.flush()


class Numbers(Entries):
    """Numbers that are float64 exactly."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(np.float64)

    def mark_equal(self, wanted: Sequence[Number], into_S: Mask) -> None:
        """Set the slots of items that hold one of these."""
        exact = [float(value) for value in wanted if not is_wide(value)]
        if exact:
            self._mark(among(self._values.values, exact), into_S)

    def mark_inside(self, lower: Bound | None, upper: Bound | None, into_S: Mask) -> None:
        """Set the slots of items with a number between two numbers."""
        low, high = lower and _float_bound(lower, math.inf), upper and _float_bound(upper, -math.inf)
        self._mark(_inside(self._values.values, low, high), into_S)


class BigIntColumn(Entries):
    """Integers that no float64 is equal to, as Python's own; slower, and exact."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(object)

    def mark_equal(self, wanted: Sequence[Number], into_S: Mask) -> None:
        """Set the slots of items that hold one of these."""
        among = {value for value in wanted if is_wide(value)}
        if among:
            self._mark(np.fromiter((value in among for value in self._values.values), np.bool_), into_S)

    def mark_inside(self, lower: Bound | None, upper: Bound | None, into_S: Mask) -> None:
        """Set the slots of items with a number between two numbers."""
        self._mark(_inside(self._values.values, lower, upper), into_S)


def constant(value: bool | None) -> int:
    """The code of a value without a vocabulary."""
    return NULL if value is None else TRUE if value else FALSE


def none_is_wide(values: Sequence[Number]) -> bool:
    """Whether all are so small that this can be seen at once; of others `is_wide` says it one by one."""
    try:
        return bool((np.abs(np.array(values, np.float64)) < MOST_EXACT).all())
    except OverflowError:
        return False


def is_wide(value: Number) -> bool:
    """Whether a number is no float64: an integer beyond 2^53 that would have to be rounded."""
    try:
        return float(value) != value
    except OverflowError:
        return True


def _inside(values: NDArray[Any], lower: Bound | None, upper: Bound | None) -> Mask:
    """Which values lie between bounds of their kind."""
    hit = np.ones(len(values), np.bool_)
    for bound, inner, end in ((lower, np.greater, np.greater_equal), (upper, np.less, np.less_equal)):
        if bound is not None:
            # Of the same dtype: NumPy would take a string for one of fixed width, and cut off trailing NULs.
            compare = end if bound.closed else inner
            hit &= compare(values, np.array(bound.value, values.dtype)).astype(np.bool_)
    return hit


def _place(ordered: Sequence[str], bound: Bound, *, before: bool) -> int:
    """Where a bound falls among ordered words, before or behind the word that equals it."""
    return (bisect_left if before else bisect_right)(ordered, str(bound.value))


def _float_bound(bound: Bound, inwards: float) -> Bound:
    """The same bound for float64 numbers, and a float64 itself: NumPy would round another to the nearest."""
    value = bound.value
    assert not isinstance(value, str)
    if not is_wide(value):
        return Bound(float(value), bound.closed)
    try:
        nearest = float(value)
    except OverflowError:  # beyond every float64
        nearest = math.inf if value > 0 else -math.inf
    outside = nearest < value if inwards > 0 else nearest > value
    return Bound(math.nextafter(nearest, inwards) if outside else nearest, closed=True)


def among(values_E: NDArray[np.float64], wanted: Sequence[float]) -> Mask:
    """Which values equal one of `wanted`, by hash tables that hold one number a bucket; several where buckets clash."""
    hit_E = np.zeros(len(values_E), np.bool_)
    if len(wanted) <= FEW:
        for one in wanted:
            hit_E |= values_E == one
        return hit_E
    bucket_E = _bucket(values_E)
    left_W = np.unique(np.array(wanted))
    while len(left_W):
        bucket_W, first = np.unique(_bucket(left_W), return_index=True)
        table = np.full(BUCKETS, np.nan)
        table[bucket_W] = left_W[first]
        hit_E |= table.take(bucket_E) == values_E
        left_W = np.delete(left_W, first)
    return hit_E


def _bucket(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Fibonacci hashing of float64 bits, equal for 0.0 and -0.0: 0 to BUCKETS - 1."""
    bits = (values + 0.0).view(np.uint64)
    return ((bits * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(48)).view(np.int64)


def successor(text: str) -> str | None:
    """The first string behind all that begin with `text`, by code points; None: there is none."""
    head = text.rstrip(chr(0x10FFFF))
    if not head:
        return None
    following = ord(head[-1]) + 1
    # Surrogates are no characters.
    return head[:-1] + chr(0xE000 if following == 0xD800 else following)
