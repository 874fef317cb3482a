"""What is kept of items by slot: a row of numbers each, and two texts in one piece of memory.

A string of Python's own takes 50 bytes more each, and a cache miss; and of an item that is found one is enough, since
the numbers of its row lie beside each other. Not thread-safe. Shape suffixes: S slots, N of them, 5 columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

NOBODY = -1
"""The key of a slot that no item holds, and the slot of no item."""
KEY, SEQ, FIRST, SECOND, END = range(5)
"""The columns: an item's key, the number of its last write, where its texts begin and change in the memory, and end."""
COLUMNS = 5
MIN_FREED = 1 << 20
"""So many bytes of freed texts are worth packing the others, where they are more than those."""


class KeptItems:
    """See the module."""

    def __init__(self) -> None:
        self.memory = bytearray()
        """Texts stay where they are in it: they are only ever put behind all others, or packed into another one."""
        self._numbers = array("q")
        # NumPy's look at the numbers; None after slots were added: while there is one they cannot be.
        self._looked: Numbers | None = None
        self._freed = 0

    def slots(self) -> int:
        """How many there are, S."""
        return len(self._numbers) // COLUMNS

    def size(self) -> int:
        """Bytes of texts."""
        return len(self.memory) - self._freed

    def add(self, keys: Sequence[int], seqs: Sequence[int], texts: JoinedTexts, again: Sequence[int] = ()) -> None:
        """Items in slots that nobody holds: in these the first, in as many slots more the others."""
        rows_N5 = np.column_stack([keys, seqs, texts.places_N3 + len(self.memory)])
        if again:
            self._table()[again] = rows_N5[: len(again)]
        self._append(rows_N5[len(again) :])
        self.memory += texts.texts

    def load(self, keys_N: Numbers, seqs_N: Numbers, texts: NDArray[np.uint8], places_N3: Numbers) -> None:
        """As many slots more (N), with texts that begin, change and end there in `texts`."""
        self._append(np.column_stack([keys_N, seqs_N, places_N3 + len(self.memory)]))
        self.memory += texts.data
        self._freed += len(texts) - int((places_N3[:, 2] - places_N3[:, 0]).sum())

    def copied(self) -> tuple[Numbers, Numbers, NDArray[np.uint8], Numbers]:
        """What `load` takes of all slots."""
        rows_S5 = self._table()
        # NumPy copies without holding up other threads; a view of the memory would keep it from growing.
        texts = np.frombuffer(self.memory, np.uint8).copy()
        return rows_S5[:, KEY].copy(), rows_S5[:, SEQ].copy(), texts, rows_S5[:, FIRST:].copy()

    def stamp(self, slots: Sequence[int], seqs: Sequence[int]) -> None:
        """The items of these slots were written again."""
        self._table()[slots, SEQ] = seqs

    def free(self, slot: int) -> None:
        """Nobody holds a slot any more, and it has no texts."""
        row_5 = self._table()[slot]
        self._freed += int(row_5[END] - row_5[FIRST])
        row_5[KEY], row_5[FIRST:] = NOBODY, 0
        self._pack()

    def seq(self, slot: int) -> int:
        """The number of the last write of a slot's item."""
        return self._numbers[COLUMNS * slot + SEQ]

    def seqs(self, slots_N: Numbers) -> Numbers:
        """The same of some slots (N,)."""
        return self._table().take(slots_N, axis=0)[:, SEQ]

    def both(self, slot: int) -> tuple[str, str]:
        """Both texts of a slot."""
        start, middle, end = self._numbers[COLUMNS * slot + FIRST : COLUMNS * (slot + 1)]
        return self.memory[start:middle].decode(), self.memory[middle:end].decode()

    def firsts(self, slots: Sequence[int]) -> tuple[list[int], bytes]:
        """Those of the slots that hold texts, and the first ones with commas between them."""
        slots_N = np.array(slots, np.int64)
        start_N, middle_N = self._table()[slots_N, FIRST], self._table()[slots_N, SECOND]
        held_N = middle_N > start_N
        start_N, middle_N = start_N[held_N], middle_N[held_N]
        if not len(start_N):
            return [], b""
        # Byte by byte, of each text with the one behind it, which becomes the comma: slices take four times as long.
        lengths_N = middle_N - start_N + 1
        ends_N = np.cumsum(lengths_N)
        at = np.arange(ends_N[-1]) + np.repeat(start_N - (ends_N - lengths_N), lengths_N)
        joined = np.frombuffer(self.memory, np.uint8).take(at, mode="clip")
        joined[ends_N - 1] = ord(",")
        return slots_N[held_N].tolist(), joined[:-1].tobytes()

    def rows(self, slots_N: Numbers) -> Numbers:
        """The rows of some slots (N, 5); with this `memory` they say what slots hold, whatever is written later."""
        return self._table().take(slots_N, axis=0)

    def _table(self) -> Numbers:
        """The rows of all slots (S, 5), without a copy."""
        if (rows_S5 := self._looked) is None:
            rows_S5 = self._looked = np.asarray(self._numbers).reshape(-1, COLUMNS)
        return rows_S5

    def _append(self, rows_N5: Numbers) -> None:
        self._looked = None
        self._numbers.frombytes(rows_N5.tobytes())

    def _pack(self) -> None:
        """Move the texts together, in their order, where much is freed."""
        if self._freed <= max(MIN_FREED, len(self.memory) // 2):
            return
        start_S, end_S = self._table()[:, FIRST], self._table()[:, END]
        order = np.argsort(start_S, kind="stable")
        order = order[end_S[order] > start_S[order]]
        lengths_N, before = (end_S - start_S)[order], memoryview(self.memory)
        self.memory = bytearray().join(before[a:b] for a, b in zip(start_S[order], end_S[order], strict=True))
        moved_S = np.zeros_like(start_S)
        moved_S[order] = np.cumsum(lengths_N) - lengths_N - start_S[order]
        self._table()[:, FIRST:] += moved_S[:, np.newaxis]
        self._freed = 0


def texts_of(rows_N5: Numbers, memory: bytearray) -> list[tuple[str, str]]:
    """Both texts of some rows (N,)."""
    return [(memory[a:b].decode(), memory[b:c].decode()) for a, b, c in rows_N5[:, FIRST:].tolist()]


class JoinedTexts(NamedTuple):
    """Pairs of texts, one behind the other, and where each begins, changes and ends (N, 3)."""

    texts: bytes
    places_N3: Numbers


def joined_texts(firsts: Sequence[bytes], seconds: Sequence[bytes]) -> JoinedTexts:
    """Pairs of texts (N,), joined."""
    pairs = [b""] * (2 * len(firsts))
    pairs[::2], pairs[1::2] = firsts, seconds
    ends = np.cumsum([0, *map(len, pairs)], dtype=np.int64)
    return JoinedTexts(b"".join(pairs), np.column_stack([ends[:-1:2], ends[1::2], ends[2::2]]))
