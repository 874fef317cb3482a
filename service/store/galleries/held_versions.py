"""Which versions a gallery's items hold embeddings of, in SQL, and how many items each of them serves."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, exists, false, func, select

from service.store.galleries.embeddings import first_held
from service.store.rows import EMPTIED
from service.store.sql.arrays import key_table
from service.store.sql.partitioned import in_gallery
from service.store.tables import deployment, embedding, item, version

FIRST_ITEMS = 1_000
"""Items whose versions are read first: all of a small gallery, and nearly always all versions of a large one."""


def live_items_by_version(connection: Connection, gallery_id: int, order: Sequence[int]) -> dict[int, int]:
    """Version id -> how many live items it serves with this order of preference, oldest version first.

    Reads every item; a replica counts faster.
    """
    live = (item.c.gallery_id == gallery_id, item.c.deleted == false())
    each = select(first_held(order).label("version_id")).where(*live).subquery()
    counted = select(each.c.version_id, func.count()).where(each.c.version_id.is_not(None)).group_by(each.c.version_id)
    return {row[0]: row[1] for row in connection.execute(counted.order_by(each.c.version_id))}


def versions_with_embeddings(connection: Connection, gallery_id: int) -> set[int]:
    """The versions of which live items of the gallery hold embeddings."""
    live = (item.c.gallery_id == gallery_id, item.c.deleted == false())
    some = list(connection.execute(select(item.c.id).where(*live).order_by(item.c.id).limit(FIRST_ITEMS)).scalars())
    of_some = (embedding.c.item_id.in_(key_table(connection, some).keys), in_gallery(embedding, gallery_id))
    found = set(connection.execute(select(embedding.c.version_id).where(*of_some).distinct()).scalars())
    if len(some) < FIRST_ITEMS:
        return found
    # One item per version is enough and found by the index on versions, which SQLite has in one for all galleries;
    # `gallery_id + 0` keeps the database from using the index on galleries.
    conditions = (item.c.id == embedding.c.item_id, item.c.gallery_id + 0 == gallery_id, item.c.deleted == false())
    exists_embedding = exists().where(
        embedding.c.version_id == version.c.id, in_gallery(embedding, gallery_id), *conditions
    )
    others = select(version.c.id).where(version.c.id.not_in(found), exists_embedding)
    return found | set(connection.execute(others).scalars())


def versions_emptied(connection: Connection, gallery_id: int) -> set[int]:
    """Retired versions whose embeddings were removed by TRUNCATE, but may still be in replicas, see `EMPTIED`."""
    conditions = (deployment.c.gallery_id == gallery_id, deployment.c.to_free == EMPTIED)
    return set(connection.execute(select(deployment.c.version_id).where(*conditions)).scalars())


def retired_versions(connection: Connection) -> set[tuple[int, str]]:
    """The pairs of a gallery and a version, by name, that was retired there; its items may hold it again."""
    retired = select(deployment.c.gallery_id, version.c.name).join(version, version.c.id == deployment.c.version_id)
    return {(row[0], row[1]) for row in connection.execute(retired.where(deployment.c.state == "retired").distinct())}


def version_names(connection: Connection) -> set[str]:
    """The names of all versions."""
    return set(connection.execute(select(version.c.name)).scalars())


def holds_version_named(connection: Connection, gallery_id: int, name: str) -> bool:
    """Whether an item of the gallery holds an embedding of the version of this name."""
    conditions = (version.c.name == name, embedding.c.version_id == version.c.id, in_gallery(embedding, gallery_id))
    of_gallery = (item.c.id == embedding.c.item_id, item.c.gallery_id == gallery_id)
    return bool(connection.execute(select(exists().where(*conditions, *of_gallery))).scalar())
