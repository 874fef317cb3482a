"""Items: in no shard, or in a version that no query reaches; and versions that nobody uses."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from sqlalchemy import exists, false, select

from service.doctor.findings import Context, Finding
from service.errors import UnknownGallery
from service.registry.placement import activate, route_to
from service.store.repository import gallery_row, live_items_by_version, take_seq
from service.store.tables import embedding, item


def check(context: Context, fix: bool) -> list[Finding]:
    """`no_active_embedding`, `unreachable`, `version_unused`."""
    return [_lost(context, fix), *_reach(context)]


def _lost(context: Context, fix: bool) -> Finding:
    lost = Finding(
        "no_active_embedding",
        "error",
        "items are in no shard: the embedding they are active in is missing",
        "--fix puts them where another embedding of theirs belongs; for the rest start a reencode backfill, or "
        "ingest them again",
        fixable=True,
    )
    for row in context.galleries():
        with context.database.read() as connection:
            missing = connection.execute(_lost_items(row.id)).all()
        for each in missing:
            lost.add(f"{row.name}/{each.external_id}")
        if fix and missing:
            lost.fixed += _place(context, row.id)
    return lost


def _place(context: Context, gallery_id: int) -> int:
    """Put every item of the gallery where it belongs; returns how many are in a shard again."""
    with suppress(UnknownGallery), context.database.write() as connection:
        take_seq(connection, gallery_id, 0)
        gallery = gallery_row(connection, gallery_id)
        if gallery is not None and gallery.current_id is not None:
            before = connection.execute(_lost_items(gallery_id)).all()
            context.registry.sync_edges()
            activate(connection, context.registry, gallery_id, context.registry.by_id(gallery.current_id))
            return len(before) - len(connection.execute(_lost_items(gallery_id)).all())
    return 0


def _reach(context: Context) -> list[Finding]:
    unreachable = Finding(
        "unreachable",
        "error",
        "items lie in versions that queries of the current version cannot reach",
        "start a backfill, add an edge, or roll back",
    )
    unused = Finding(
        "version_unused",
        "info",
        "versions that no gallery uses and no edge needs",
        "`regraft version delete` removes one",
    )
    registry = context.registry
    used: set[int | None] = set()
    for row in context.galleries():
        current = None if row.current_id is None else registry.by_id(row.current_id)
        with context.database.read() as connection:
            items_by_version = live_items_by_version(connection, row.id)
            used |= {row.current_id, *connection.execute(_versions_held(row.id)).scalars()}
        for version_id, count in items_by_version.items():
            held = registry.by_id(version_id)
            if current is not None and route_to(registry, current, held) is None:
                unreachable.add(f"{row.name}: {count} items of {held.name}", count)
    needed = {edge.old for edge in registry.graph().edges}
    for registered in registry.all():
        if registered.id not in used and registered.name not in needed:
            unused.add(registered.name)
    return [unreachable, unused]


def _lost_items(gallery_id: int) -> Any:
    active = exists().where(embedding.c.item_id == item.c.id, embedding.c.version_id == item.c.active_id)
    return select(item.c.external_id).where(item.c.gallery_id == gallery_id, item.c.deleted == false(), ~active)


def _versions_held(gallery_id: int) -> Any:
    held = select(embedding.c.version_id).join(item, item.c.id == embedding.c.item_id)
    return held.where(item.c.gallery_id == gallery_id).distinct()
