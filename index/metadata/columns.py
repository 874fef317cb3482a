"""Columns: the values of one metadata field over all items, in arrays that NumPy tests at once.

An entry is a value and the slot of its item. An item with an array has one entry per element, an item without the field
has none. Strings are dictionary-encoded, so a test compares each distinct string once. Entries are append-only until
`keep` drops those of freed slots.

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

from index.metadata.filter import Bound

Mask = NDArray[np.bool_]
Number = int | float

NULL, FALSE, TRUE, CONTAINER = range(4)
FIRST_WORD = 4
"""The first code of a word of the vocabulary; lower codes are constants."""

MAX_EXACT_INT = 2.0**53
"""Integers up to this one are exact in float64; the next one is rounded to it."""
MAX_COMPARED_SINGLY = 8
"""Up to this many numbers are compared one after the other, more by a hash table."""
BUCKETS = 1 << 16
SORT_BATCH = 8_192
"""Words sorted in one step, which takes some milliseconds; fewer new words stay unsorted."""


class GrowingArray:
    """A NumPy array that grows. Appended values can be read after `flush`."""

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
        """All flushed values, without a copy."""
        return self._array[: self._count]

    @values.setter
    def values(self, values: NDArray[Any]) -> None:
        self._array, self._count = values, len(values)


class Column:
    """Values of one kind and the slots of the items that hold them."""

    __slots__ = ("_aligned", "_appended", "_slots", "_values")

    def __init__(self, dtype: Any) -> None:
        self._slots = GrowingArray(np.int32)
        self._values = GrowingArray(dtype)
        # Whether entry n belongs to slot n: then a test needs no indirection.
        self._aligned = True
        self._appended = 0

    def extend(self, slots: Sequence[int], values: Sequence[object]) -> None:
        """Add entries; tests see them after `flush`."""
        before, self._appended = self._appended, self._appended + len(slots)
        self._aligned = self._aligned and list(range(before, self._appended)) == slots
        self._slots.extend(slots)
        self._values.extend(values)

    def flush(self) -> None:
        """Make appended entries searchable."""
        self._slots.flush()
        self._values.flush()

    def count(self) -> int:
        """Number of entries."""
        return len(self._slots.values)

    def keep(self, kept_S: Mask) -> None:
        """Drop the entries of slots that are not in `kept_S`."""
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


class SortedWords:
    """Consecutive words of a vocabulary with their ranks, so that a range of strings is a range of ranks."""

    __slots__ = ("_rank_V", "_sorted")

    def __init__(self, words: Sequence[str]) -> None:
        """`words`: distinct, ordered by code."""
        order = sorted(range(len(words)), key=words.__getitem__)
        self._sorted = [words[at] for at in order]
        self._rank_V = np.empty(len(words), np.int32)
        self._rank_V[order] = np.arange(len(words))

    def inside(self, lower: Bound | None, upper: Bound | None) -> Mask:
        """Whether each word, by code (V,), lies between two bounds."""
        low = 0 if lower is None else _position(self._sorted, lower, before=lower.closed)
        high = len(self._sorted) if upper is None else _position(self._sorted, upper, before=not upper.closed)
        return (self._rank_V >= low) & (self._rank_V < high)


class StringColumn(Column):
    """Strings, null, true, false, and a marker for containers.

    Words are sorted in batches. The unsorted rest is compared as Python strings, as NumPy's strings drop trailing NULs.
    """

    __slots__ = ("_code_of", "_sorted", "_unsorted")

    def __init__(self) -> None:
        super().__init__(np.int32)
        self._code_of: dict[str, int] = {}
        # All words by code: sorted batches of SORT_BATCH each, then the newest words, not yet sorted.
        self._sorted: list[SortedWords] = []
        self._unsorted: list[str] = []

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
        self._unsorted += [*islice(reversed(code_of), len(code_of) - before)][::-1]

    def flush(self) -> None:
        super().flush()
        ripe = len(self._unsorted) - len(self._unsorted) % SORT_BATCH
        for start in range(0, ripe, SORT_BATCH):
            self._sorted.append(SortedWords(self._unsorted[start : start + SORT_BATCH]))
        del self._unsorted[:ripe]

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
        parts = [words.inside(lower, upper) for words in self._sorted]
        waiting_V = _inside(np.array(self._unsorted, object), lower, upper)
        wanted_V = np.concatenate([np.zeros(FIRST_WORD, np.bool_), *parts, waiting_V])
        if wanted_V.any():
            self._mark(wanted_V.take(self._values.values), into_S)

    def keep(self, kept_S: Mask) -> None:
        """Drop entries, and the unused words of the vocabulary if they are more than half of it."""
        super().keep(kept_S)
        codes_E = self._values.values
        kept_C = np.zeros(FIRST_WORD + len(self._code_of), np.bool_)
        kept_C[codes_E] = True
        used_V = kept_C[FIRST_WORD:]
        if 2 * np.count_nonzero(used_V) < len(used_V):
            kept_C[:FIRST_WORD] = True
            self._values.values = np.cumsum(kept_C, dtype=np.int32)[codes_E] - 1
            self._unsorted = [*compress(self._code_of, used_V.tolist())]  # in the order of their codes
            self._code_of = dict(zip(self._unsorted, count(FIRST_WORD), strict=False))
            self._sorted = []
            self.flush()


class NumberColumn(Column):
    """Numbers that float64 represents exactly."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(np.float64)

    def mark_equal(self, wanted: Sequence[Number], into_S: Mask) -> None:
        """Set the slots of items that hold one of these."""
        exact = [float(value) for value in wanted if not is_inexact(value)]
        if exact:
            self._mark(equal_any(self._values.values, exact), into_S)

    def mark_inside(self, lower: Bound | None, upper: Bound | None, into_S: Mask) -> None:
        """Set the slots of items with a number between two numbers."""
        low, high = lower and _float_bound(lower, math.inf), upper and _float_bound(upper, -math.inf)
        self._mark(_inside(self._values.values, low, high), into_S)


class BigIntColumn(Column):
    """Integers that float64 cannot represent, as Python ints; slower."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(object)

    def mark_equal(self, wanted: Sequence[Number], into_S: Mask) -> None:
        """Set the slots of items that hold one of these."""
        equal_any = {value for value in wanted if is_inexact(value)}
        if equal_any:
            self._mark(np.fromiter((value in equal_any for value in self._values.values), np.bool_), into_S)

    def mark_inside(self, lower: Bound | None, upper: Bound | None, into_S: Mask) -> None:
        """Set the slots of items with a number between two numbers."""
        self._mark(_inside(self._values.values, lower, upper), into_S)


def constant(value: bool | None) -> int:
    """The code of null, true or false."""
    return NULL if value is None else TRUE if value else FALSE


def all_exact(values: Sequence[Number]) -> bool:
    """Whether all numbers are surely exact in float64; if False, check each by `is_inexact`."""
    try:
        return bool((np.abs(np.array(values, np.float64)) < MAX_EXACT_INT).all())
    except OverflowError:
        return False


def is_inexact(value: Number) -> bool:
    """Whether a number is an integer beyond 2^53 that float64 would round."""
    try:
        return float(value) != value
    except OverflowError:
        return True


def _inside(values: NDArray[Any], lower: Bound | None, upper: Bound | None) -> Mask:
    """Whether each value lies between two bounds of the same type."""
    hit = np.ones(len(values), np.bool_)
    for bound, inner, end in ((lower, np.greater, np.greater_equal), (upper, np.less, np.less_equal)):
        if bound is not None:
            # Same dtype: NumPy would convert a string to one of fixed width and cut off trailing NULs.
            compare = end if bound.closed else inner
            hit &= compare(values, np.array(bound.value, values.dtype)).astype(np.bool_)
    return hit


def _position(ordered: Sequence[str], bound: Bound, *, before: bool) -> int:
    """The position of a bound among sorted words, before or after an equal word."""
    return (bisect_left if before else bisect_right)(ordered, str(bound.value))


def _float_bound(bound: Bound, inwards: float) -> Bound:
    """An equivalent bound that is exact in float64; NumPy would round it to the nearest number."""
    value = bound.value
    assert not isinstance(value, str)
    if not is_inexact(value):
        return Bound(float(value), bound.closed)
    try:
        nearest = float(value)
    except OverflowError:  # beyond every float64
        nearest = math.inf if value > 0 else -math.inf
    outside = nearest < value if inwards > 0 else nearest > value
    return Bound(math.nextafter(nearest, inwards) if outside else nearest, closed=True)


def equal_any(values_E: NDArray[np.float64], wanted: Sequence[float]) -> Mask:
    """Whether each value equals one of `wanted`, by hash tables with one number per bucket (one more per collision)."""
    hit_E = np.zeros(len(values_E), np.bool_)
    if len(wanted) <= MAX_COMPARED_SINGLY:
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
    """Fibonacci hash of float64 bits, 0 to BUCKETS - 1; equal for 0.0 and -0.0."""
    bits = (values + 0.0).view(np.uint64)
    return ((bits * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(48)).view(np.int64)


def successor(text: str) -> str | None:
    """The first string, by code points, after all that begin with `text`; None: there is none."""
    head = text.rstrip(chr(0x10FFFF))
    if not head:
        return None
    following = ord(head[-1]) + 1
    # Surrogates are not characters.
    return head[:-1] + chr(0xE000 if following == 0xD800 else following)
