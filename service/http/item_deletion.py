"""Deleting items: by their ids in one transaction, by a filter in as many short ones as it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, and_, false, func, select

from index.filter import parse_filter
from service.backfills.supplied import counting
from service.http.auth import ShuttingDown
from service.runtime import Runtime
from service.store.filtering import passing
from service.store.ranges import Keys, keys_by_age, pieces
from service.store.repository import delete_items, gallery_named, rows_of, take_seq
from service.store.sql_arrays import listed
from service.store.tables import item

BLOCK = 1_000
"""Items deleted by a filter in one transaction."""
PAUSE_SECONDS = 0.005
"""Between two of them, so that those who wait to write get their turn."""


def delete_named(service: Runtime, name: str, ids: Sequence[str], *, dry_run: bool = False) -> set[str]:
    """Delete items by their ids, all different. Returns those that were there."""
    if dry_run:
        with service.database.read() as connection:
            rows = rows_of(connection, gallery_named(connection, name).id, ids)
        return {row.external_id for row in rows if not row.deleted}
    with service.database.write() as connection:
        gallery_id = gallery_named(connection, name).id
        take_seq(connection, gallery_id, 0)
        there, blobs = _delete(connection, gallery_id, ids)
    _show(service, gallery_id, blobs)
    return there


def delete_passing(service: Runtime, name: str, given: dict[str, Any], *, dry_run: bool = False) -> int:
    """Delete the items that pass a filter, of those that are there now. Returns how many.

    An item is looked at once more by the transaction that deletes it: one that was written meanwhile goes if it passes
    as it then is, and one that came meanwhile stays. Whatever ends this in between, what was deleted stays deleted.

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
    deleted = 0
    for keys in pieces(found, BLOCK):
        if service.stopping.is_set():
            raise ShuttingDown(f"the service is being stopped; {deleted} items are deleted, ask again for the others")
        deleted += _delete_block(service, gallery_id, keys, given)
        time.sleep(PAUSE_SECONDS)
    return deleted


def _delete_block(service: Runtime, gallery_id: int, keys: Keys, given: dict[str, Any]) -> int:
    """Delete those of these items that pass, and show that they are gone. Returns how many."""
    with service.database.write() as connection:
        take_seq(connection, gallery_id, 0)
        live = and_(item.c.deleted == false(), item.c.id.in_(listed(connection, keys.tolist()).keys))
        ids = passing(connection, live, given, item.c.external_id)
        there, blobs = _delete(connection, gallery_id, list(ids.values()))
    _show(service, gallery_id, blobs)
    return len(there)


def _delete(connection: Connection, gallery_id: int, ids: Sequence[str]) -> tuple[set[str], list[str]]:
    """As `delete_items`, in a transaction that holds the gallery's lock."""
    with counting(connection, gallery_id, ids, "skipped"):
        return delete_items(connection, gallery_id, ids)


def _show(service: Runtime, gallery_id: int, blobs: Sequence[str]) -> None:
    """Remove what the deleted items referred to, and have the replica follow."""
    service.blobs.remove(blobs)
    service.replica.refresh(gallery_id)
