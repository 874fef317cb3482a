"""Shard: the live vectors of one version in one gallery.

`FaissShard` is exact. It keeps rows densely packed in one array (a removed row is overwritten by the last one), so that
FAISS's brute-force kernel scans memory without tombstones or id translation tables. It is not thread-safe: the gallery
locks around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import faiss
import numpy as np
from numpy.typing import NDArray

from index.space import Space, Vectors

Keys = NDArray[np.int64]

MISSING = -1
"""The key that fills a result row when the shard holds fewer than k items."""


class Shard(Protocol):
    """What the gallery asks of any engine."""

    def upsert(self, keys: Sequence[int] | Keys, vectors_ND: Vectors) -> None:
        """Store or replace the vectors of `keys` (all different)."""

    def delete(self, keys: Sequence[int] | Keys) -> None:
        """Remove `keys`; unknown ones are ignored."""

    def search(self, queries_QD: Vectors, k: int) -> tuple[Vectors, Keys]:
        """The k best items per query as (scores (Q, k), keys (Q, k)), best first, in the space's own score.

        Rows are padded with MISSING keys when there are fewer than k items.
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
        self._row_of: dict[int, int] = {}
        self._metric = faiss.METRIC_INNER_PRODUCT if space.inner_product else faiss.METRIC_L2

    def upsert(self, keys: Sequence[int] | Keys, vectors_ND: Vectors) -> None:
        """Store or replace; see Shard."""
        self._reserve(len(self._row_of) + len(keys))
        rows = [self._row_of.setdefault(int(key), len(self._row_of)) for key in keys]
        self._rows_RW[rows] = self.space.items(vectors_ND)
        self._keys_R[rows] = keys

    def delete(self, keys: Sequence[int] | Keys) -> None:
        """Remove; see Shard."""
        for key in keys:
            row = self._row_of.pop(int(key), None)
            if row is None:
                continue
            last = len(self._row_of)
            if row != last:
                self._rows_RW[row], self._keys_R[row] = self._rows_RW[last], self._keys_R[last]
                self._row_of[int(self._keys_R[row])] = row

    def search(self, queries_QD: Vectors, k: int) -> tuple[Vectors, Keys]:
        """Scan everything; see Shard."""
        count = len(self._row_of)
        rows_QW = self.space.queries(queries_QD)
        scores_QK = np.zeros((len(rows_QW), k), np.float32)
        keys_QK = np.full((len(rows_QW), k), MISSING, np.int64)
        found = min(k, count)
        if found and len(rows_QW):
            scanned, at = faiss.knn(rows_QW, self._rows_RW[:count], found, metric=self._metric)
            scores_QK[:, :found] = self.space.score(scanned)
            keys_QK[:, :found] = self._keys_R[at]
        return scores_QK, keys_QK

    def fetch(self, keys: Sequence[int] | Keys) -> Vectors:
        """Stored rows; see Shard."""
        return self._rows_RW[[self._row_of[int(key)] for key in keys]]

    def count(self) -> int:
        """Number of items."""
        return len(self._row_of)

    def _reserve(self, rows: int) -> None:
        if rows <= len(self._keys_R):
            return
        grown = max(rows, 2 * len(self._keys_R), 1024)
        self._rows_RW = np.concatenate(
            [self._rows_RW, np.empty((grown - len(self._rows_RW), self._rows_RW.shape[1]), np.float32)]
        )
        self._keys_R = np.concatenate([self._keys_R, np.empty(grown - len(self._keys_R), np.int64)])
