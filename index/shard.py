"""Shard: the live vectors of one version in one gallery.

`FaissShard` is exact. It keeps rows densely packed in one array (a removed row is overwritten by the last one), so that
FAISS's brute-force kernel scans memory without tombstones or id translation tables. It is not thread-safe: the gallery
locks around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from index.scan import Mask, Rows, scan, scan_some
from index.space import Lorentz, Space, Vectors

Keys = NDArray[np.int64]

MISSING = -1
"""The key that fills a result row when the shard holds fewer than k items."""


MIN_CANDIDATES, CANDIDATES_GROW = 16, 8
"""So many more than are wanted are scored exactly where the scan rounds, and so many times more where it may err."""
MIN_ROWS = 4
"""A process may hold many galleries of a few items."""


class Shard(Protocol):
    """What the gallery asks of any engine."""

    def upsert(self, keys: Sequence[int] | Keys, vectors_ND: Vectors, slots_N: Keys | None = None) -> None:
        """Store or replace the vectors of `keys` (all different).

        `slots_N` says where in `allowed` each item looks whether it may be found; by default at its key.
        """

    def delete(self, keys: Sequence[int] | Keys) -> None:
        """Remove `keys`; unknown ones are ignored."""

    def search(self, queries_QD: Vectors, k: int, allowed: Mask | None = None) -> tuple[Vectors, Keys]:
        """The k best items per query as (scores (Q, k), keys (Q, k)), best first, in the space's own score.

        Only items with `allowed[slot]` are found; None: all. Rows are padded with MISSING keys when there are fewer
        than k of them.
        """

    def fetch(self, keys: Sequence[int] | Keys) -> Vectors:
        """The stored vectors of `keys`, (N, W). Raises KeyError for an unknown one."""

    def count(self) -> int:
        """Number of items."""


class FaissShard:
    """Exact search by FAISS's brute-force kernel over one array in memory."""

    def __init__(self, dim: int, space: Space) -> None:
        self.space = space
        self._rows_RW: Vectors = np.empty((0, space.width(dim)), np.float32)
        self._keys_R: Keys = np.empty(0, np.int64)
        self._slots_R: Keys = np.empty(0, np.int64)
        self._row_of: dict[int, int] = {}

    def upsert(self, keys: Sequence[int] | Keys, vectors_ND: Vectors, slots_N: Keys | None = None) -> None:
        """Store or replace; see Shard."""
        self._reserve(len(self._row_of) + len(keys))
        rows = [self._row_of.setdefault(int(key), len(self._row_of)) for key in keys]
        self._rows_RW[rows] = self.space.items(vectors_ND)
        self._keys_R[rows] = keys
        self._slots_R[rows] = keys if slots_N is None else slots_N

    def delete(self, keys: Sequence[int] | Keys) -> None:
        """Remove; see Shard."""
        for key in keys:
            row = self._row_of.pop(int(key), None)
            if row is None:
                continue
            last = len(self._row_of)
            if row != last:
                self._rows_RW[row], self._keys_R[row] = self._rows_RW[last], self._keys_R[last]
                self._slots_R[row] = self._slots_R[last]
                self._row_of[int(self._keys_R[row])] = row

    def search(self, queries_QD: Vectors, k: int, allowed: Mask | None = None) -> tuple[Vectors, Keys]:
        """Scan all rows, or those allowed; see Shard."""
        count = len(self._row_of)
        queries_QW = self.space.queries(queries_QD)
        allowed_R = None if allowed is None else allowed[self._slots_R[:count]]
        scores_QK = np.zeros((len(queries_QW), k), np.float32)
        keys_QK = np.full((len(queries_QW), k), MISSING, np.int64)
        found = min(k, count if allowed_R is None else int(np.count_nonzero(allowed_R)))
        if found and len(queries_QW):
            if isinstance(self.space, Lorentz):
                scores_QK[:, :found], at = self._rescored(self.space, queries_QD, queries_QW, allowed_R, found)
            else:
                scanned, at = self._scan(queries_QW, allowed_R, found)
                scores_QK[:, :found] = self.space.score(scanned)
            keys_QK[:, :found] = self._keys_R[at]
        return scores_QK, keys_QK

    def _scan(self, queries_QW: Vectors, allowed_R: Mask | None, k: int) -> tuple[Vectors, Rows]:
        rows_RW, inner_product = self._rows_RW[: len(self._row_of)], self.space.inner_product
        if allowed_R is None:
            return scan(queries_QW, rows_RW, k, inner_product=inner_product)
        return scan_some(queries_QW, rows_RW, allowed_R, k, inner_product=inner_product)

    def _rescored(
        self, space: Lorentz, queries_QD: Vectors, queries_QW: Vectors, allowed_R: Mask | None, k: int
    ) -> tuple[Vectors, Rows]:
        """The k best by exact distance: as many candidates as it takes until no other row can be among them."""
        count = len(self._row_of) if allowed_R is None else int(np.count_nonzero(allowed_R))
        scores_QK, at_QK = np.empty((len(queries_QD), k), np.float32), np.empty((len(queries_QD), k), np.int64)
        waiting, depth = np.arange(len(queries_QD)), min(count, k + MIN_CANDIDATES)
        while len(waiting):
            scanned, at = self._scan(queries_QW[waiting], allowed_R, depth)
            left = []
            for number, row_scanned, row_at in zip(waiting.tolist(), scanned, at, strict=True):
                distances = space.distances(queries_QD[number], self._rows_RW[row_at])
                best = np.argsort(distances, kind="stable")[:k]
                scores_QK[number], at_QK[number] = distances[best], row_at[best]
                if depth < count and space.nearest(queries_QD[number], float(row_scanned[-1])) < distances[best[-1]]:
                    left.append(number)
            waiting, depth = np.array(left, np.int64), min(count, CANDIDATES_GROW * depth)
        return scores_QK, at_QK

    def fetch(self, keys: Sequence[int] | Keys) -> Vectors:
        """Stored rows; see Shard."""
        return self._rows_RW[[self._row_of[int(key)] for key in keys]]

    def count(self) -> int:
        """Number of items."""
        return len(self._row_of)

    def _reserve(self, rows: int) -> None:
        if rows <= len(self._keys_R):
            return
        grown = max(rows, 2 * len(self._keys_R), MIN_ROWS)
        room = grown - len(self._keys_R)
        self._rows_RW = np.concatenate([self._rows_RW, np.empty((room, self._rows_RW.shape[1]), np.float32)])
        self._keys_R = np.concatenate([self._keys_R, np.empty(room, np.int64)])
        self._slots_R = np.concatenate([self._slots_R, np.empty(room, np.int64)])
