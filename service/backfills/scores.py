"""Numbers that are told of items, in arrays: what planning holds of a large gallery beside their keys.

Eight bytes a key and eight a number; as Python's objects they would take ten times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Select

from service.store.ranges import RANGE, Keys
from service.store.repository import STREAMED


class Scored(NamedTuple):
    """What is told of some items, compactly: (N,) their keys, ascending, and a number of each."""

    keys: Keys
    numbers: NDArray[np.float64]

    def of(self, keys: Keys, otherwise: float) -> NDArray[np.float64]:
        """(M,) the numbers of these keys; `otherwise` where nothing is told."""
        if not len(self.keys):
            return np.full(len(keys), otherwise)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[places] == keys, self.numbers[places], otherwise)


NOTHING_TOLD = Scored(np.empty(0, np.int64), np.empty(0))


def told(connection: Connection, scored: Select[Any]) -> Scored:
    """What a statement tells of items, as arrays."""
    parts = [
        np.array([(row[0], float(row[1])) for row in rows], [("key", np.int64), ("number", np.float64)])
        for rows in connection.execute(scored, execution_options=STREAMED).partitions(RANGE)
    ]
    return scored_of([(part["key"], part["number"]) for part in parts])


def scored_of(parts: Sequence[tuple[Keys, NDArray[np.float64]]]) -> Scored:
    """Keys and numbers in any order, in the order of the keys."""
    if not parts:
        return NOTHING_TOLD
    keys, numbers = (np.concatenate(column) for column in zip(*parts, strict=True))
    places = np.argsort(keys)
    return Scored(keys[places], numbers[places])
