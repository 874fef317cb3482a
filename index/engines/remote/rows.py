"""`RemoteRows`: the valid rows of a remote collection, with their slots and `served` bits.

Columns sorted by key, without vectors: some fifty bytes per row, for any width. A row is alive unless its item was
replaced or deleted. Not thread-safe.
Shape suffixes: N rows given, R rows, S slots.
"""

from __future__ import annotations

import numpy as np

from index.engines.base import MISSING, Keys
from index.scan import Mask, Rows

ROW_BYTES = 4 * 8 + 3
"""Bytes of a row: key, feed number, digest and slot, and three bits, a byte each."""


class RemoteRows:
    """See the module."""

    def __init__(self) -> None:
        # Over-allocated, so that most additions, which have higher keys, need no copy.
        self._columns_4R = np.empty((4, 0), np.int64)
        self._bits_2R = np.empty((2, 0), np.bool_)
        self._rows = 0
        self.additions = 0
        """Number of calls that added rows."""
        self._refresh()

    def add(self, keys_N: Keys, digests_N: Keys, seqs_N: Keys, slots_N: Keys, served_N: Mask) -> None:
        """Add rows of distinct keys, replacing earlier rows of these keys."""
        self.additions += 1
        order_N = np.argsort(keys_N, kind="stable")
        columns_4N = np.stack([keys_N, seqs_N, digests_N, slots_N])[:, order_N]
        bits_2N = np.stack([np.ones(len(keys_N), np.bool_), served_N])[:, order_N]
        mostly_dead = self._rows > 2 * self._alive
        if len(keys_N) and self._rows and (mostly_dead or columns_4N[0, 0] <= self.keys_R[-1]):
            left_R = self.alive_R & ~np.isin(self.keys_R, keys_N)
            columns_4N = np.concatenate([self._columns_4R[:, : self._rows][:, left_R], columns_4N], axis=1)
            bits_2N = np.concatenate([self._bits_2R[:, : self._rows][:, left_R], bits_2N], axis=1)
            order_N = np.argsort(columns_4N[0], kind="stable")
            columns_4N, bits_2N, self._rows = columns_4N[:, order_N], bits_2N[:, order_N], 0
        after = self._rows + columns_4N.shape[1]
        self._reserve(after)
        self._columns_4R[:, self._rows : after] = columns_4N
        self._bits_2R[:, self._rows : after] = bits_2N
        self._rows = after
        self._refresh()

    def find(self, keys_N: Keys) -> Rows:
        """The alive row of each key (N,); MISSING if there is none."""
        if not self._rows:
            return np.full(len(keys_N), MISSING, np.int64)
        at_N = np.searchsorted(self.keys_R, keys_N).clip(max=self._rows - 1)
        return np.where((self.keys_R[at_N] == keys_N) & self.alive_R[at_N], at_N, MISSING)

    def keep_matching(self, keys_N: Keys, digests_N: Keys, slots_N: Keys, served_N: Mask) -> Mask:
        """Keep rows of these keys that have the given digests, mark others dead; returns whether each was kept (N,)."""
        at_N = self.find(keys_N)
        held_N: Mask = at_N != MISSING
        same_N: Mask = held_N.copy()
        same_N[held_N] = self.digests_R[at_N[held_N]] == digests_N[held_N]
        self.alive_R[at_N[held_N & ~same_N]] = False
        self._columns_4R[3, at_N[same_N]] = slots_N[same_N]
        self.served_R[at_N[same_N]] = served_N[same_N]
        if held_N.any():
            self._refresh()
        return same_N

    def mark_dead(self, keys_N: Keys) -> None:
        """Mark the rows of these keys dead; unknown keys are ignored."""
        at_N = self.find(keys_N)
        at_N = at_N[at_N != MISSING]
        if len(at_N):
            self.alive_R[at_N] = False
            self._refresh()

    def serve(self, served_S: Mask) -> None:
        """Set which rows are served, by slot."""
        self.served_R[self.alive_R] = served_S[self.slots_R[self.alive_R]]
        self._refresh()

    def live(self, allowed_S: Mask | None) -> Mask:
        """Whether each row (R,) is alive, served and allowed."""
        return self._live_R if allowed_S is None else self._live_R & allowed_S[self.slots_R]

    def row_count(self) -> int:
        """Number of alive rows, served or not."""
        return self._alive

    def count(self) -> int:
        """Number of alive, served rows."""
        return self._count

    def slots(self) -> Keys:
        """The slots of all alive rows."""
        slots_M: Keys = self.slots_R[self.alive_R]
        return slots_M

    def bytes(self) -> int:
        """Memory in bytes."""
        return self._columns_4R.shape[1] * ROW_BYTES

    def _refresh(self) -> None:
        self.keys_R, self.seqs_R, self.digests_R, self.slots_R = self._columns_4R[:, : self._rows]
        self.alive_R, self.served_R = self._bits_2R[:, : self._rows]
        self._live_R: Mask = self.alive_R & self.served_R
        self._alive, self._count = int(np.count_nonzero(self.alive_R)), int(np.count_nonzero(self._live_R))

    def _reserve(self, rows: int) -> None:
        if rows <= self._columns_4R.shape[1]:
            return
        columns_4R, bits_2R = np.empty((4, 2 * rows), np.int64), np.empty((2, 2 * rows), np.bool_)
        columns_4R[:, : self._rows] = self._columns_4R[:, : self._rows]
        bits_2R[:, : self._rows] = self._bits_2R[:, : self._rows]
        self._columns_4R, self._bits_2R = columns_4R, bits_2R
