"""`ItemTable`: the items of a gallery by slot: a row of five integers each, and two texts each in one buffer.

Compared with Python objects, this saves 50 bytes and a cache miss per string; the integers of an item are adjacent and
cost one miss. Not thread-safe. Shape suffixes: S slots, N of them, 5 columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NO_ITEM = -1
"""The key of a free slot, and the slot of no item."""
KEY, SEQ, FIRST, SECOND, END = range(5)
"""The columns: an item's key, the feed number of its last write, the offsets of its two texts and of their end."""
COLUMNS = 5
MIN_FREED_BYTES = 1 << 20
"""The buffer is compacted if more bytes than this, and more than half of the buffer, are freed."""


class ItemTable:
    """See the module."""

    def __init__(self) -> None:
        self.memory = bytearray()
        """The texts; append-only, so offsets stay valid. `_pack` compacts them into another buffer."""
        self._array = array("q")
        # A NumPy view of the array, which cannot grow while the view exists; None after slots were added.
        self._view: Ints | None = None
        self._freed = 0

    def slot_count(self) -> int:
        """Number of slots, S."""
        return len(self._array) // COLUMNS

    def text_bytes(self) -> int:
        """Bytes of all texts."""
        return len(self.memory) - self._freed

    def add(self, keys: Sequence[int], seqs: Sequence[int], texts: JoinedTexts, again: Sequence[int] = ()) -> None:
        """Add items: the first into the free slots `again`, the others into new slots."""
        rows_N5 = np.column_stack([keys, seqs, texts.text_offsets_N3 + len(self.memory)])
        if again:
            self._table()[again] = rows_N5[: len(again)]
        self._append(rows_N5[len(again) :])
        self.memory += texts.texts

    def load(self, keys_N: Ints, seqs_N: Ints, texts: NDArray[np.uint8], text_offsets_N3: Ints) -> None:
        """Add N new slots; `text_offsets_N3` are offsets in `texts`."""
        self._append(np.column_stack([keys_N, seqs_N, text_offsets_N3 + len(self.memory)]))
        self.memory += texts.data
        self._freed += len(texts) - int((text_offsets_N3[:, 2] - text_offsets_N3[:, 0]).sum())

    def copy_columns(self) -> tuple[Ints, Ints, NDArray[np.uint8], Ints]:
        """The arguments of `load` for all slots."""
        rows_S5 = self._table()
        # NumPy releases the GIL while it copies; a view would keep the memory from growing.
        texts = np.frombuffer(self.memory, np.uint8).copy()
        return rows_S5[:, KEY].copy(), rows_S5[:, SEQ].copy(), texts, rows_S5[:, FIRST:].copy()

    def stamp(self, slots: Sequence[int], seqs: Sequence[int]) -> None:
        """Set the feed numbers of the last writes of some slots."""
        self._table()[slots, SEQ] = seqs

    def free(self, slot: int) -> None:
        """Free a slot and its texts."""
        row_5 = self._table()[slot]
        self._freed += int(row_5[END] - row_5[FIRST])
        row_5[KEY], row_5[FIRST:] = NO_ITEM, 0
        self._pack()

    def seq(self, slot: int) -> int:
        """The feed number of the last write of a slot's item."""
        return self._array[COLUMNS * slot + SEQ]

    def seqs(self, slots_N: Ints) -> Ints:
        """The feed numbers of the last writes of some slots (N,)."""
        return self._table().take(slots_N, axis=0)[:, SEQ]

    def texts(self, slot: int) -> tuple[str, str]:
        """Both texts of a slot."""
        start, middle, end = self._array[COLUMNS * slot + FIRST : COLUMNS * (slot + 1)]
        return self.memory[start:middle].decode(), self.memory[middle:end].decode()

    def first_texts(self, slots: Sequence[int]) -> tuple[list[int], bytes]:
        """The given slots that have a first text, and these texts joined by commas."""
        slots_N = np.array(slots, np.int64)
        start_N, middle_N = self._table()[slots_N, FIRST], self._table()[slots_N, SECOND]
        held_N = middle_N > start_N
        start_N, middle_N = start_N[held_N], middle_N[held_N]
        if not len(start_N):
            return [], b""
        # Gather bytes, each text with its next byte, which becomes the comma: slicing takes four times as long.
        lengths_N = middle_N - start_N + 1
        ends_N = np.cumsum(lengths_N)
        at = np.arange(ends_N[-1]) + np.repeat(start_N - (ends_N - lengths_N), lengths_N)
        joined = np.frombuffer(self.memory, np.uint8).take(at, mode="clip")
        joined[ends_N - 1] = ord(",")
        return slots_N[held_N].tolist(), joined[:-1].tobytes()

    def rows(self, slots_N: Ints) -> Ints:
        """The rows of some slots (N, 5); with the present `memory` they stay readable after later writes."""
        return self._table().take(slots_N, axis=0)

    def _table(self) -> Ints:
        """The rows of all slots (S, 5), without a copy."""
        if (rows_S5 := self._view) is None:
            rows_S5 = self._view = np.asarray(self._array).reshape(-1, COLUMNS)
        return rows_S5

    def _append(self, rows_N5: Ints) -> None:
        self._view = None
        self._array.frombytes(rows_N5.tobytes())

    def _pack(self) -> None:
        """Compact the texts, in order, if many bytes are freed."""
        if self._freed <= max(MIN_FREED_BYTES, len(self.memory) // 2):
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


def texts_of(rows_N5: Ints, memory: bytearray) -> list[tuple[str, str]]:
    """Both texts of each row (N,)."""
    return [(memory[a:b].decode(), memory[b:c].decode()) for a, b, c in rows_N5[:, FIRST:].tolist()]


class JoinedTexts(NamedTuple):
    """Concatenated pairs of texts, and the offsets (N, 3) of each pair: first, second, end."""

    texts: bytes
    text_offsets_N3: Ints


def joined_texts(first_texts: Sequence[bytes], seconds: Sequence[bytes]) -> JoinedTexts:
    """Concatenate pairs of texts (N,)."""
    pairs = [b""] * (2 * len(first_texts))
    pairs[::2], pairs[1::2] = first_texts, seconds
    ends = np.cumsum([0, *map(len, pairs)], dtype=np.int64)
    return JoinedTexts(b"".join(pairs), np.column_stack([ends[:-1:2], ends[1::2], ends[2::2]]))
