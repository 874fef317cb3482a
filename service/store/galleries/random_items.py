"""Items in a random order, with memory in proportion to the items drawn, not to all items.

Each key is hashed with the seed, and items are ordered by their hashes. Keys are read in ranges, and those with the
lowest hashes are kept. As an item's hash does not depend on other items, a sample of a growing gallery keeps most of
its items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection

from service.store.galleries.ranges import KEYS_PER_RANGE, Keys
from service.store.sql.arrays import blocks, key_range
from service.store.tables import item

FIRST_BLOCK = 65_536
"""Keys that the first pass over all items returns; each further pass returns twice as many."""

Hashes = NDArray[np.uint64]


class RandomItems:
    """The keys of the items that meet `condition`, in an order drawn by `seed`; read lazily."""

    def __init__(self, connection: Connection, condition: ColumnElement[bool], seed: int) -> None:
        """`seed`: 0 or more, below 2 to the power of 64."""
        self._connection, self._condition, self._seed = connection, condition, seed
        self.total = 0
        """How many items meet the condition; known once the first key was read."""

    def first(self, count: int) -> list[int]:
        """The first `count` keys, or all."""
        keys: list[int] = []
        for block in self.in_blocks(count) if count else ():
            keys += block[: count - len(keys)]
            if len(keys) == count:
                break
        return keys

    def in_blocks(self, size: int) -> Iterator[Sequence[int]]:
        """All keys, in blocks of at most `size`."""
        count, after = FIRST_BLOCK, None
        while True:
            keys, after = self._next(count, after)
            yield from blocks(keys.tolist(), size)
            if len(keys) < count:
                return
            count *= 2

    def _next(self, count: int, after: np.uint64 | None) -> tuple[Keys, np.uint64 | None]:
        """The next `count` keys after a hash, and the last of their hashes: one pass over all items."""
        keys, hashes, total = np.empty(0, np.int64), np.empty(0, np.uint64), 0
        for range_keys in self._ranges():
            total += len(range_keys)
            range_hashes = _hashes(range_keys, self._seed)
            kept = slice(None) if after is None else range_hashes > after
            keys, hashes = np.concatenate([keys, range_keys[kept]]), np.concatenate([hashes, range_hashes[kept]])
            if len(keys) > count:
                lowest = np.argpartition(hashes, count - 1)[:count]
                keys, hashes = keys[lowest], hashes[lowest]
        self.total = total
        order = np.argsort(hashes)
        return keys[order], hashes[order[-1]] if len(order) else after

    def _ranges(self) -> Iterator[Keys]:
        after: int | None = None
        while len(keys := key_range(self._connection, item.c.id, self._condition, KEYS_PER_RANGE, after)):
            yield keys
            after = int(keys[-1])


def _hashes(keys: Keys, seed: int) -> Hashes:
    """(N,) keys -> (N,) hashes, all different: splitmix64 (Steele, Lea and Flood, 2014)."""
    return _mix(keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + _mix(np.array([seed], np.uint64)))


def _mix(numbers: Hashes) -> Hashes:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))
