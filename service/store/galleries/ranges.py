"""Iterate over the items of a large gallery: their keys as arrays, one range of keys at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, and_

from service.store.database.connections import Database
from service.store.galleries.filtering import passing
from service.store.sql.arrays import key_range
from service.store.tables import item

KEYS_PER_RANGE = 65_536
"""The most keys that are read at a time."""

Keys = NDArray[np.int64]


def keys_by_age(
    database: Database,
    condition: ColumnElement[bool],
    filter_json: dict[str, Any] | None,
    *,
    newest_first: bool = False,
    after: int | None = None,
) -> Iterator[Keys]:
    """The keys of the items that meet `condition` and pass the metadata filter, if any, oldest items first.

    Each range is read in its own transaction. `after`: the key after which to begin; newer items have greater keys.
    """
    while True:
        with database.read() as connection:
            keys = key_range(connection, item.c.id, condition, KEYS_PER_RANGE, after, descending=newest_first)
            passed = keys if filter_json is None else _passing(connection, condition, filter_json, keys)
        yield passed
        if len(keys) < KEYS_PER_RANGE:
            return
        after = int(keys[-1])


def _passing(connection: Connection, condition: ColumnElement[bool], filter_json: dict[str, Any], keys: Keys) -> Keys:
    if not len(keys):
        return keys
    in_range = item.c.id.between(int(keys.min()), int(keys.max()))
    return keys[np.isin(keys, list(passing(connection, and_(condition, in_range), filter_json)))]


def take(blocks: Iterable[Keys], limit: int | None) -> Iterator[Keys]:
    """The first `limit` keys of the blocks; None: all."""
    for block in blocks:
        if limit is None:
            yield block
        elif limit > 0:
            yield block[:limit]
            limit -= len(block)
        else:
            return


def regroup(blocks: Iterable[Keys], size: int) -> Iterator[Keys]:
    """The same keys in blocks of `size`, the last of which may be smaller; no block is empty."""
    rest = np.empty(0, np.int64)
    for block in blocks:
        rest = np.concatenate([rest, block])
        while len(rest) >= size:
            yield rest[:size]
            rest = rest[size:]
    if len(rest):
        yield rest
