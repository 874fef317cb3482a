"""The keys of a gallery's items, a range at a time, in arrays: how a large gallery is gone through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, and_

from service.store.database import Database
from service.store.filtering import passing
from service.store.sql_arrays import key_range
from service.store.tables import item

RANGE = 65_536
"""Keys that are read at a time."""

Keys = NDArray[np.int64]


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
