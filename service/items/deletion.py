"""Delete items: by their ids in one transaction, by a filter in short transactions of a block each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from service.backfills.supplied import tracking_supplied
from service.items.by_filter import change_passing
from service.runtime import Runtime
from service.store.galleries.gallery import gallery_named, take_seq
from service.store.galleries.items import delete_items, rows_of


def delete_named(service: Runtime, name: str, ids: Sequence[str], *, dry_run: bool = False) -> set[str]:
    """Delete items by their ids, all different. Returns the ids that existed."""
    if dry_run:
        with service.database.read() as connection:
            rows = rows_of(connection, gallery_named(connection, name).id, ids)
        return {row.external_id for row in rows if not row.deleted}
    with service.database.write() as connection:
        gallery_id = gallery_named(connection, name).id
        take_seq(connection, gallery_id, 0)
        deleted, blobs = _delete(connection, gallery_id, ids)
    service.blobs.remove(blobs)
    service.replica.refresh(gallery_id)
    return deleted


def delete_passing(service: Runtime, name: str, where: dict[str, Any], *, dry_run: bool = False) -> int:
    """Delete the items that pass a filter. Returns and raises as `change_passing`."""

    def change(connection: Connection, gallery_id: int, ids: list[str]) -> tuple[int, Sequence[str]]:
        deleted, blobs = _delete(connection, gallery_id, ids)
        return len(deleted), blobs

    return change_passing(service, name, where, change, "deleted", dry_run=dry_run)


def _delete(connection: Connection, gallery_id: int, ids: Sequence[str]) -> tuple[set[str], list[str]]:
    """As `delete_items`, in a transaction that holds the gallery's lock."""
    with tracking_supplied(connection, gallery_id, ids, "skipped"):
        return delete_items(connection, gallery_id, ids)
