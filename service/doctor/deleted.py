"""Check for deleted galleries that are not completely freed."""

from __future__ import annotations

import threading
from contextlib import suppress

from sqlalchemy import func, select

from service.doctor.findings import Context, Finding
from service.store.galleries.deletion import deleted_galleries
from service.store.tables import item
from service.upgrades.gallery_removal import free_gallery


def check(context: Context, fix: bool) -> list[Finding]:
    """`gallery_half_freed`."""
    finding = Finding(
        "gallery_half_freed",
        "info",
        "deleted galleries whose data are not yet freed",
        "the service frees them after its next start; --fix frees them now",
        fixable=True,
    )
    with context.database.read() as connection:
        for gallery_id in deleted_galleries(connection):
            statement = select(func.count()).select_from(item).where(item.c.gallery_id == gallery_id)
            finding.add(f"number {gallery_id}: {connection.execute(statement).scalar_one()} items")
    if fix and finding.count:
        with context.database.lookup() as connection:
            gallery_ids = deleted_galleries(connection)
        for gallery_id in gallery_ids:
            with suppress(TimeoutError):  # the service is reading its partitions, and frees it later
                free_gallery(context.database, context.blobs, gallery_id, threading.Event())
                finding.fixed += 1
    return [finding]
