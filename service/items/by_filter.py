"""Change every item that passes a filter, in short transactions of a block each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, and_, false, func, select

from index.metadata.filter import parse_filter
from service.errors import ShuttingDown
from service.runtime import Runtime
from service.store.galleries.filtering import passing
from service.store.galleries.gallery import gallery_named, take_seq
from service.store.galleries.ranges import Keys, keys_by_age, regroup
from service.store.sql.arrays import key_table
from service.store.tables import item

BLOCK = 1_000
"""Items that are changed in one transaction."""
PAUSE_SECONDS = 0.005
"""Pause between two transactions, in which other writers get the lock."""
Change = Callable[[Connection, int, list[str]], tuple[int, Sequence[str]]]
"""Changes items by ids, in the gallery with this key, whose lock the transaction holds.

Returns how many items it changed, and the blobs that nothing refers to any more.
"""


def change_passing(
    service: Runtime, name: str, where: dict[str, Any], change: Change, done: str, *, dry_run: bool = False
) -> int:
    """Change the items that exist now and pass a filter. Returns how many; in a dry run, how many pass.

    The transaction that changes an item filters it again: an item written meanwhile is changed if it still passes, and
    an item added meanwhile is not. If this ends early, the blocks already changed stay changed.

    Args:
        service: the service.
        name: of the gallery.
        where: the filter.
        change: changes a block.
        done: the participle for errors: `deleted`, `updated`.
        dry_run: only count.

    Raises:
        InvalidFilter: the filter is invalid.
        ShuttingDown: the service was asked to stop.
    """
    parse_filter(where)  # an empty gallery would not check it
    with service.database.read() as connection:
        gallery_id = gallery_named(connection, name).id
        newest = select(func.coalesce(func.max(item.c.id), 0)).where(item.c.gallery_id == gallery_id)
        last = connection.execute(newest).scalar_one()
    existing = and_(item.c.gallery_id == gallery_id, item.c.deleted == false(), item.c.id <= last)
    passing_keys = keys_by_age(service.database, existing, where)
    if dry_run:
        return sum(map(len, passing_keys))
    changed = 0
    for keys in regroup(passing_keys, BLOCK):
        if service.stopping.is_set():
            raise ShuttingDown(
                f"the service is stopping; {changed} items are {done}: repeat the request for the others"
            )
        changed += _change_block(service, gallery_id, keys, where, change)
        time.sleep(PAUSE_SECONDS)
    return changed


def _change_block(service: Runtime, gallery_id: int, keys: Keys, where: dict[str, Any], change: Change) -> int:
    with service.database.write() as connection:
        take_seq(connection, gallery_id, 0)
        live = and_(item.c.deleted == false(), item.c.id.in_(key_table(connection, keys.tolist()).keys))
        ids = passing(connection, live, where, item.c.external_id)
        changed, orphans = change(connection, gallery_id, list(ids.values()))
    service.blobs.remove(orphans)
    service.replica.refresh(gallery_id)
    return changed
