"""`FlatShard`: exact search over rows in memory, by FAISS's brute-force kernel.

Rows are densely packed in one array (a removed row is overwritten by the last one), so a scan needs neither tombstones
nor a translation of ids. Not thread-safe: the gallery locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from index.engines.base import MISSING, Hits, Keys, Scanned, is_full
from index.engines.exact import nearest_rows
from index.scan import Mask
from index.space import Space, Vectors

T = TypeVar("T", bound=np.generic)

ENTRY_BYTES = 100
"""Bytes of an entry in a dictionary of keys: hash, key, row, and free space."""
MIN_ROWS = 4
"""Rows allocated at first; few, because a process may hold many galleries of a few items."""


class FlatShard:
    """See the module."""

    is_remote = False

    def __init__(self, dim: int, space: Space) -> None:
        self.space, self.dim = space, dim
        self._rows_RW: Vectors = np.empty((0, space.width(dim)), np.float32)
        self._keys_R: Keys = np.empty(0, np.int64)
        self._slots_R: Keys = np.empty(0, np.int64)
        self._served_R: Mask = np.empty(0, np.bool_)
        self._served = 0
        self._row_of: dict[int, int] = {}

    def upsert(
        self,
        keys: Sequence[int] | Keys,
        vectors_ND: Vectors,
        slots_N: Keys | None = None,
        served_N: Mask | None = None,
    ) -> None:
        """Store or replace; see Shard."""
        self.reserve(len(keys))
        rows = self._rows_for(np.asarray(keys, np.int64).tolist())
        self._rows_RW[rows] = self.space.items(vectors_ND)
        self._keys_R[rows] = keys
        self._slots_R[rows] = keys if slots_N is None else slots_N
        self._served_R[rows] = True if served_N is None else served_N
        self._recount()

    def reserve(self, more: int) -> None:
        """Grow the arrays by copying them; see Shard."""
        rows = len(self._row_of) + more
        if rows <= len(self._keys_R):
            return
        grown = max(rows, 2 * len(self._keys_R), MIN_ROWS)
        self._rows_RW = _grown(self._rows_RW, grown)
        self._slots_R = _grown(self._slots_R, grown)
        self._served_R = _grown(self._served_R, grown)
        self._keys_R = _grown(self._keys_R, grown)

    def delete(self, keys: Sequence[int] | Keys) -> None:
        """Remove; see Shard."""
        for key in keys if self._row_of else ():
            row = self._row_of.pop(int(key), None)
            if row is None:
                continue
            last = len(self._row_of)
            if row != last:
                self._rows_RW[row], self._keys_R[row] = self._rows_RW[last], self._keys_R[last]
                self._slots_R[row], self._served_R[row] = self._slots_R[last], self._served_R[last]
                self._row_of[int(self._keys_R[row])] = row
        self._recount()

    def serve(self, served_S: Mask) -> None:
        """Set which rows are served; see Shard."""
        count = self.row_count()
        self._served_R[:count] = served_S[self._slots_R[:count]]
        self._recount()

    def search(
        self,
        queries_QD: Vectors,
        k: int,
        allowed_S: Mask | None = None,
        *,
        exact: bool = False,
        recall: float | None = None,
        share: float = 1.0,
    ) -> Hits:
        """Scan all allowed rows; see Shard."""
        count = len(self._row_of)
        allowed_R = None if self._served == count else self._served_R[:count]
        if allowed_S is not None:
            passed_R = allowed_S[self._slots_R[:count]]
            allowed_R = passed_R if allowed_R is None else passed_R & allowed_R
        scores_QK, at_QK = nearest_rows(self.space, queries_QD, self._rows_RW[:count], allowed_R, k)
        slots_QK, full = self._slots_R.take(at_QK) if count else at_QK, is_full(at_QK)
        if not full:
            slots_QK[at_QK == MISSING] = MISSING
        scanned = Scanned(count if allowed_R is None else int(np.count_nonzero(allowed_R)))
        return Hits(scores_QK, slots_QK, full, scanned, k)

    def fetch(self, keys: Sequence[int] | Keys) -> Vectors:
        """Stored rows; see Shard."""
        return self._rows_RW[[self._row_of[int(key)] for key in keys]]

    def has(self, keys_N: Keys) -> Mask:
        """Whether each key has a row (N,)."""
        return np.fromiter((key in self._row_of for key in keys_N.tolist()), np.bool_, len(keys_N))

    def rows(self) -> tuple[Vectors, Keys, Keys, Mask]:
        """Rows (R, W), keys, slots and `served` bits (R,), without copies; valid until the next change."""
        count = len(self._row_of)
        return self._rows_RW[:count], self._keys_R[:count], self._slots_R[:count], self._served_R[:count]

    def bytes(self) -> int:
        """Memory in bytes."""
        arrays = (self._rows_RW, self._keys_R, self._slots_R, self._served_R)
        return sum(array.nbytes for array in arrays) + len(self._row_of) * ENTRY_BYTES

    def slots(self) -> Sequence[Keys]:
        """The slot of each row; see Shard."""
        return [self._slots_R[: self.row_count()]]

    def row_count(self) -> int:
        """Number of rows."""
        return len(self._row_of)

    def count(self) -> int:
        """Number of served items."""
        return self._served

    def _recount(self) -> None:
        self._served = int(np.count_nonzero(self._served_R[: len(self._row_of)]))

    def _rows_for(self, keys: list[int]) -> list[int] | slice:
        """The row of each key; new keys get the next rows."""
        before, count = len(self._row_of), len(keys)
        if self._row_of.keys().isdisjoint(keys):
            self._row_of.update(zip(keys, range(before, before + count), strict=True))
            if len(self._row_of) == before + count:
                return slice(before, before + count)  # all are new, as when a gallery is loaded
            for key in keys:  # some keys are repeated
                self._row_of.pop(key, None)
        return [self._row_of.setdefault(key, len(self._row_of)) for key in keys]


def _grown(array: NDArray[T], rows: int) -> NDArray[T]:
    """A copy of the array for this many rows; unused rows are not written, so they take no physical memory."""
    grown = np.empty((rows, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
