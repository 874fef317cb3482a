"""Galleries that were deleted, and of which something is left."""

from __future__ import annotations

import threading

from sqlalchemy import func, select

from service.doctor.findings import Context, Finding
from service.store.deletion import deleted_galleries
from service.store.tables import item
from service.upgrades.gallery_removal import free_gallery


def check(context: Context, fix: bool) -> list[Finding]:
    """`gallery_half_freed`."""
    left = Finding(
        "gallery_half_freed",
        "info",
        "galleries were deleted, and what they held is not freed yet",
        "a service that starts goes on with it; --fix frees it now",
        fixable=True,
    )
    with context.database.read() as connection:
        for gallery_id in deleted_galleries(connection):
            mine = select(func.count()).select_from(item).where(item.c.gallery_id == gallery_id)
            left.add(f"number {gallery_id}: {connection.execute(mine).scalar_one()} items")
    if fix and left.count:
        with context.database.lookup() as connection:
            found = deleted_galleries(connection)
        for gallery_id in found:
            free_gallery(context.database, context.blobs, gallery_id, threading.Event())
            left.fixed += 1
    return [left]
