"""Changing every item that passes a filter, in as many short transactions as it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, and_, false, func, select

from index.filter import parse_filter
from service.http.auth import ShuttingDown
from service.runtime import Runtime
from service.store.filtering import passing
from service.store.ranges import Keys, keys_by_age, pieces
from service.store.repository import gallery_named, take_seq
from service.store.sql_arrays import listed
from service.store.tables import item

BLOCK = 1_000
"""Items that are changed in one transaction."""
PAUSE_SECONDS = 0.005
"""Between two of them, so that those who wait to write get their turn."""
Change = Callable[[Connection, int, list[str]], tuple[int, Sequence[str]]]
"""Changes the items of these ids, of the gallery with this key, whose lock the transaction holds.

Returns how many it changed, and the blobs that nothing refers to any more.
"""


def change_passing(
    service: Runtime, name: str, given: dict[str, Any], change: Change, done: str, *, dry_run: bool = False
) -> int:
    """Change the items that pass a filter, of those that are there now. Returns how many; in a dry run, how many pass.

    An item is looked at once more by the transaction that changes it: one that was written meanwhile counts if it
    passes as it then is, and one that came meanwhile stays as it is. Whatever ends this in between, what was changed
    stays so.

    Args:
        service: the service.
        name: the gallery's.
        given: the filter.
        change: what to do.
        done: what became of items then, as in `deleted`.
        dry_run: do nothing.

    Raises:
        InvalidFilter: it is no filter.
        ShuttingDown: the service was asked to stop.
    """
    parse_filter(given)  # which is not looked at where no item is there
    with service.database.read() as connection:
        gallery_id = gallery_named(connection, name).id
        newest = select(func.coalesce(func.max(item.c.id), 0)).where(item.c.gallery_id == gallery_id)
        last = connection.execute(newest).scalar_one()
    there = and_(item.c.gallery_id == gallery_id, item.c.deleted == false(), item.c.id <= last)
    found = keys_by_age(service.database, there, given)
    if dry_run:
        return sum(map(len, found))
    changed = 0
    for keys in pieces(found, BLOCK):
        if service.stopping.is_set():
            raise ShuttingDown(f"the service is being stopped; {changed} items are {done}, ask again for the others")
        changed += _change_block(service, gallery_id, keys, given, change)
        time.sleep(PAUSE_SECONDS)
    return changed


def _change_block(service: Runtime, gallery_id: int, keys: Keys, given: dict[str, Any], change: Change) -> int:
    with service.database.write() as connection:
        take_seq(connection, gallery_id, 0)
        live = and_(item.c.deleted == false(), item.c.id.in_(listed(connection, keys.tolist()).keys))
        ids = passing(connection, live, given, item.c.external_id)
        changed, orphans = change(connection, gallery_id, list(ids.values()))
    service.blobs.remove(orphans)
    service.replica.refresh(gallery_id)
    return changed
