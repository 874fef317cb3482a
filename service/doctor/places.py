"""Items: in no shard, or in a version that no query reaches; and versions that nobody uses."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, exists, false, select, update

from service.deployments.placement import preference, route_to
from service.doctor.findings import Finding, Patient
from service.repository import live_mix, take_seq
from service.tables import embedding, item


def look(patient: Patient, fix: bool) -> list[Finding]:
    """`no_active_embedding`, `unreachable`, `version_unused`."""
    return [_lost(patient, fix), *_reach(patient)]


def _lost(patient: Patient, fix: bool) -> Finding:
    lost = Finding(
        "no_active_embedding",
        "error",
        "items are in no shard: the embedding they are active in is missing",
        "--fix puts them where another embedding of theirs belongs; for the rest start a reencode backfill, or "
        "ingest them again",
        fixable=True,
    )
    for row in patient.galleries():
        with patient.database.read() as connection:
            missing = connection.execute(_without_embedding(row.id)).all()
        for each in missing:
            lost.add(f"{row.name}/{each.external_id}")
        if fix and missing and row.current_id is not None:
            lost.fixed += _place(patient, row, [each.id for each in missing])
    return lost


def _place(patient: Patient, row: Row[Any], ids: list[int]) -> int:
    catalog = patient.catalog
    best = {held.id: n for n, held in enumerate(preference(catalog, catalog.by_id(row.current_id)))}
    placed = 0
    with patient.database.write() as connection:
        first = take_seq(connection, row.id, len(ids))
        still = {each.id for each in connection.execute(_without_embedding(row.id))}
        for number, key in enumerate(key for key in ids if key in still):
            held = connection.execute(select(embedding.c.version_id).where(embedding.c.item_id == key)).scalars()
            if version_id := min(held, key=lambda v: best.get(v, len(best)), default=None):
                moved = update(item).where(item.c.id == key).values(active_id=version_id, seq=first + number)
                placed += connection.execute(moved).rowcount
    return placed


def _reach(patient: Patient) -> list[Finding]:
    unreachable = Finding(
        "unreachable",
        "error",
        "items lie in versions that queries of the current version cannot reach",
        "start a backfill, add an edge, or roll back",
    )
    unused = Finding("version_unused", "info", "versions that no gallery uses and no edge needs", "nothing to do")
    catalog = patient.catalog
    used: set[int] = set()
    for row in patient.galleries():
        current = None if row.current_id is None else catalog.by_id(row.current_id)
        with patient.database.read() as connection:
            mix = live_mix(connection, row.id)
            used |= {row.current_id, *connection.execute(_versions_held(row.id)).scalars()}
        for version_id, count in mix.items():
            held = catalog.by_id(version_id)
            if current is not None and route_to(catalog, current, held) is None:
                unreachable.add(f"{row.name}: {count} items of {held.name}", count)
    needed = {edge.old for edge in catalog.graph().edges}
    for registered in catalog.all():
        if registered.id not in used and registered.name not in needed:
            unused.add(registered.name)
    return [unreachable, unused]


def _without_embedding(gallery_id: int) -> Any:
    active = exists().where(embedding.c.item_id == item.c.id, embedding.c.version_id == item.c.active_id)
    return select(item.c.id, item.c.external_id).where(
        item.c.gallery_id == gallery_id, item.c.deleted == false(), ~active
    )


def _versions_held(gallery_id: int) -> Any:
    held = select(embedding.c.version_id).join(item, item.c.id == embedding.c.item_id)
    return held.where(item.c.gallery_id == gallery_id).distinct()
