"""Texts by slot, in one piece of memory: a string of Python's own takes 50 bytes more each, and a cache miss.

Not thread-safe. Shape suffixes: S slots, N of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_FREED = 1 << 20
"""So many bytes of freed texts are worth packing the others, where they are more than those."""


class NotedTexts(NamedTuple):
    """Both texts of some slots (N,) in any shape, as they were when it was noted where they lie.

    That stays true: texts are only ever put behind all others, or packed into other memory.
    """

    kept: bytearray
    places: NDArray[np.int64]

    def both(self) -> list[tuple[str, str]]:
        """The texts (N,)."""
        kept = self.kept
        return [(kept[a:b].decode(), kept[b:c].decode()) for a, b, c in self.places.reshape(-1, 3).tolist()]


class KeptTexts:
    """Two texts for each slot in UTF-8, one behind the other, as they are read together."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        # Three numbers a slot, beside each other: where the first begins, where the second does, and where it ends.
        self._places = array("q")
        self._freed = 0
        # NumPy's look at the numbers of each slot (S, 3), None after a write: while there is one they cannot grow.
        self._places_S3: NDArray[np.int64] | None = None

    def size(self) -> int:
        """Bytes in use."""
        return len(self._bytes) - self._freed

    def add(self, joined: JoinedTexts, again: Sequence[int] = ()) -> None:
        """Texts of slots that hold none: of these the first, of as many slots more the others."""
        self._places_S3 = None
        places_N3 = joined.places_N3 + len(self._bytes)
        if again:
            np.asarray(self._places).reshape(-1, 3)[again] = places_N3[: len(again)]
        self._places.frombytes(places_N3[len(again) :].tobytes())
        self._bytes += joined.texts

    def load(self, texts: NDArray[np.uint8], places_N3: NDArray[np.int64]) -> None:
        """As many slots more (N), with texts that begin, change and end there in `texts`."""
        self._places_S3 = None
        start = len(self._bytes)
        self._bytes += texts.data
        self._places.frombytes((places_N3 + start).tobytes())
        self._freed += len(texts) - int((places_N3[:, 2] - places_N3[:, 0]).sum())

    def copied(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """What `load` takes of all slots."""
        # NumPy copies without holding up other threads; a view of the memory would keep it from growing.
        return np.frombuffer(self._bytes, np.uint8).copy(), np.array(self._places).reshape(-1, 3)

    def put(self, slot: int, first: bytes, second: bytes) -> None:
        """Other texts in a slot."""
        self.free(slot)
        start = len(self._bytes)
        self._bytes += first + second
        self._set(slot, start, start + len(first), len(self._bytes))

    def firsts(self, slots: Sequence[int]) -> tuple[list[int], bytes]:
        """Those of the slots that hold texts, and the first ones with commas between them."""
        slots_N = np.array(slots, np.int64)
        places_N3 = np.asarray(self._places).reshape(-1, 3)[slots_N]
        held_N = places_N3[:, 1] > places_N3[:, 0]
        start_N, middle_N, _ = places_N3[held_N].T
        if not len(start_N):
            return [], b""
        # Byte by byte, of each text with the one behind it, which becomes the comma: slices take four times as long.
        lengths_N = middle_N - start_N + 1
        ends_N = np.cumsum(lengths_N)
        at = np.arange(ends_N[-1]) + np.repeat(start_N - (ends_N - lengths_N), lengths_N)
        joined = np.frombuffer(self._bytes, np.uint8).take(at, mode="clip")
        joined[ends_N - 1] = ord(",")
        return slots_N[held_N].tolist(), joined[:-1].tobytes()

    def both(self, slot: int) -> tuple[str, str]:
        """Both texts of a slot."""
        start, middle, end = self._places[3 * slot : 3 * slot + 3]
        return self._bytes[start:middle].decode(), self._bytes[middle:end].decode()

    def noted(self, slots: NDArray[np.int64]) -> NotedTexts:
        """Both texts of slots, to be read later, whatever is written meanwhile."""
        if (places_S3 := self._places_S3) is None:
            places_S3 = self._places_S3 = np.asarray(self._places).reshape(-1, 3)
        return NotedTexts(self._bytes, places_S3.take(slots, axis=0))

    def free(self, slot: int) -> None:
        """Forget the texts of a slot."""
        self._freed += self._places[3 * slot + 2] - self._places[3 * slot]
        self._set(slot, 0, 0, 0)
        if self._freed > max(MIN_FREED, len(self._bytes) // 2):
            self._pack()

    def _set(self, slot: int, *places: int) -> None:
        self._places[3 * slot : 3 * slot + 3] = array("q", places)

    def _pack(self) -> None:
        """Move the texts together, in their order."""
        self._places_S3 = None
        places_S3 = np.array(self._places).reshape(-1, 3)
        start_S, end_S = places_S3[:, 0], places_S3[:, 2]
        order = np.argsort(start_S, kind="stable")
        order = order[end_S[order] > start_S[order]]
        lengths_N, before = (end_S - start_S)[order], memoryview(self._bytes)
        self._bytes = bytearray().join(before[a:b] for a, b in zip(start_S[order], end_S[order], strict=True))
        moved_S = np.zeros_like(start_S)
        moved_S[order] = np.cumsum(lengths_N) - lengths_N - start_S[order]
        self._places = array("q", (places_S3 + moved_S[:, np.newaxis]).tobytes())
        self._freed = 0


class JoinedTexts(NamedTuple):
    """Pairs of texts, one behind the other, and where each begins, changes and ends (N, 3)."""

    texts: bytes
    places_N3: NDArray[np.int64]


def joined_texts(firsts: Sequence[bytes], seconds: Sequence[bytes]) -> JoinedTexts:
    """Pairs of texts (N,), joined."""
    pairs = [b""] * (2 * len(firsts))
    pairs[::2], pairs[1::2] = firsts, seconds
    ends = np.cumsum([0, *map(len, pairs)], dtype=np.int64)
    return JoinedTexts(b"".join(pairs), np.column_stack([ends[:-1:2], ends[1::2], ends[2::2]]))
