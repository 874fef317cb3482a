"""Check placement: items in no shard, items served by a version that no query reaches, and unused versions."""

from __future__ import annotations

from typing import Any

from sqlalchemy import exists, false, select

from service.doctor.findings import Context, Finding
from service.registry.placement import placement_in, route_to
from service.store.galleries.held_versions import live_items_by_version, versions_with_embeddings
from service.store.sql.partitioned import of_item
from service.store.tables import item
from service.upgrades.removal import dependents


def check(context: Context) -> list[Finding]:
    """`no_embedding`, `unreachable`, `version_unused`."""
    return [_unplaced(context), *_reach(context)]


def _unplaced(context: Context) -> Finding:
    lost = Finding(
        "no_embedding",
        "error",
        "items without an embedding: they are in no shard",
        "start a reencode backfill, or ingest them again",
    )
    for row in context.galleries():
        with context.database.read() as connection:
            for each in connection.execute(_unplaced_items(row.id)):
                lost.add(f"{row.name}/{each.external_id}")
    return lost


def _reach(context: Context) -> list[Finding]:
    unreachable = Finding(
        "unreachable",
        "error",
        "items of versions that queries of the current version cannot reach",
        "start a backfill, add an edge, or roll back",
    )
    unused = Finding(
        "version_unused",
        "info",
        "versions that nothing uses",
        "`regraft version delete` removes one",
    )
    registry = context.registry
    used: set[int | None] = set()
    for row in context.galleries():
        current = None if row.current_id is None else registry.by_id(row.current_id)
        with context.database.read() as connection:
            items_by_version = live_items_by_version(connection, row.id, placement_in(registry, row).version_order)
            used |= {row.current_id, *versions_with_embeddings(connection, row.id)}
        for version_id, count in items_by_version.items():
            version = registry.by_id(version_id)
            if current is not None and route_to(registry, current, version) is None:
                unreachable.add(f"{row.name}: {count} items of {version.name}", count)
    for registered in registry.all():
        if registered.id not in used and not _is_needed(context, registered.id):
            unused.add(registered.name)
    return [unreachable, unused]


def _is_needed(context: Context, version_id: int) -> bool:
    with context.database.lookup() as connection:
        return any(dependents(connection, version_id).values())


def _unplaced_items(gallery_id: int) -> Any:
    held = exists().where(of_item())
    return select(item.c.external_id).where(item.c.gallery_id == gallery_id, item.c.deleted == false(), ~held)
