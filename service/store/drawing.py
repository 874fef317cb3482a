"""Items drawn at random, at a memory that depends on how many are wanted, not on how many there are.

Each key is given a number by a hash of it and the seed; the order drawn is that of the numbers. Keys are read in
ranges, and those of the lowest numbers are kept. So what else is there changes no item's number, and a gallery that
grows keeps most of what was drawn of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection

from service.store.ranges import RANGE
from service.store.sql_arrays import blocks, key_range
from service.store.tables import item

FIRST = 65_536
"""Keys that are drawn in a first pass over all; whoever wants more has twice as many drawn in each one more."""

Keys = NDArray[np.int64]
Numbers = NDArray[np.uint64]


class Drawing:
    """The keys of the items that `among` takes, in an order drawn by `seed`, read while they are asked for."""

    def __init__(self, connection: Connection, among: ColumnElement[bool], seed: int) -> None:
        """`seed`: 0 or more, below 2 to the power of 64."""
        self._connection, self._among, self._seed = connection, among, seed
        self.found = 0
        """How many there are, once the first were drawn."""

    def first(self, count: int) -> list[int]:
        """So many, or all."""
        drawn: list[int] = []
        for block in self.in_blocks(count) if count else ():
            drawn += block[: count - len(drawn)]
            if len(drawn) == count:
                break
        return drawn

    def in_blocks(self, size: int) -> Iterator[Sequence[int]]:
        """All of them, at most so many at a time."""
        most, behind = FIRST, None
        while True:
            keys, behind = self._pass(most, behind)
            yield from blocks(keys.tolist(), size)
            if len(keys) < most:
                return
            most *= 2

    def _pass(self, most: int, behind: np.uint64 | None) -> tuple[Keys, np.uint64 | None]:
        """The next so many behind a number, and the last of their numbers."""
        keys, numbers, found = np.empty(0, np.int64), np.empty(0, np.uint64), 0
        for block in self._ranges():
            found += len(block)
            drawn = _numbers(block, self._seed)
            good = slice(None) if behind is None else drawn > behind
            keys, numbers = np.concatenate([keys, block[good]]), np.concatenate([numbers, drawn[good]])
            if len(keys) > most:
                lowest = np.argpartition(numbers, most - 1)[:most]
                keys, numbers = keys[lowest], numbers[lowest]
        self.found = found
        order = np.argsort(numbers)
        return keys[order], numbers[order[-1]] if len(order) else behind

    def _ranges(self) -> Iterator[Keys]:
        behind: int | None = None
        while len(keys := key_range(self._connection, item.c.id, self._among, RANGE, behind)):
            yield keys
            behind = int(keys[-1])


def _numbers(keys: Keys, seed: int) -> Numbers:
    """(N,) of a key each, all different: splitmix64 (Steele, Lea and Flood, 2014)."""
    return _mixed(keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + _mixed(np.array([seed], np.uint64)))


def _mixed(numbers: Numbers) -> Numbers:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))
