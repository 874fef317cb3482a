"""Keys of items in ranges, and numbers that are told of items, in arrays: what planning holds of a large gallery.

Eight bytes a key and eight a number; as Python's objects they would take ten times as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, Select, and_

from service.backfills.filtering import passing
from service.store.database import Database
from service.store.repository import STREAMED
from service.store.sql_arrays import key_range
from service.store.tables import item

RANGE = 65_536
"""Keys that are read, and planned, at a time."""

Keys = NDArray[np.int64]


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


def keys_by_age(
    database: Database,
    among: ColumnElement[bool],
    given: dict[str, Any] | None,
    *,
    newest_first: bool = False,
    behind: int | None = None,
) -> Iterator[Keys]:
    """The keys of the items that `among` takes and the filter `given`, if any, lets pass; they grow with time.

    Each range is read in a transaction of its own. `behind` this key: where an earlier walk came to.
    """
    while True:
        with database.read() as connection:
            keys = key_range(connection, item.c.id, among, RANGE, behind, descending=newest_first)
            passed = keys if given is None or not len(keys) else _passing(connection, among, given, keys)
        yield passed
        if len(keys) < RANGE:
            return
        behind = int(keys[-1])


def _passing(connection: Connection, among: ColumnElement[bool], given: dict[str, Any], keys: Keys) -> Keys:
    within = item.c.id.between(int(keys.min()), int(keys.max()))
    return keys[np.isin(keys, list(passing(connection, and_(among, within), given)))]


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


def first(blocks: Iterable[Keys], budget: int | None) -> Iterator[Keys]:
    """So many of them, or all."""
    for block in blocks:
        if budget is None:
            yield block
        elif budget > 0:
            yield block[:budget]
            budget -= len(block)
        else:
            return


def pieces(blocks: Iterable[Keys], size: int) -> Iterator[Keys]:
    """The same keys, so many at a time; the last are fewer, and there are none without keys."""
    rest = np.empty(0, np.int64)
    for block in blocks:
        rest = np.concatenate([rest, block])
        while len(rest) >= size:
            yield rest[:size]
            rest = rest[size:]
    if len(rest):
        yield rest
