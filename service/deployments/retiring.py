"""Retiring a version: free its embeddings and shards in one gallery, once no item depends on it.

The decision is one transaction; the embeddings then go block by block, so that writers are not kept waiting. A process
that is killed in between leaves a deployment with `to_free`, and the next one that starts goes on.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, delete, exists, false, func, select, update

from index.errors import RegraftError
from service.backfills.planner import QUALIFIES, Kind
from service.database import Database
from service.deployments.history import State, on_its_way
from service.deployments.lifecycle import Moving, Order, lock, move
from service.errors import UnknownGallery
from service.repository import take_seq
from service.tables import deployment, embedding, item
from service.versions.catalog import Catalog, Registered

BLOCK = 5_000
"""Embeddings freed in one transaction."""

ENDED = (State.SUPERSEDED, State.ROLLED_BACK)


class VersionInUse(RegraftError):
    """The version is current, being deployed, or items depend on it."""

    status = 409
    code = "version_in_use"


class NothingToRetire(RegraftError):
    """No deployment of this version has ended in this gallery."""

    status = 409
    code = "nothing_to_retire"


def retire(connection: Connection, catalog: Catalog, gallery_id: int, version: Registered, order: Order) -> list[int]:
    """Mark every ended deployment of a version as retired; returns their numbers. `free` does the rest.

    Raises:
        VersionInUse: it is current, on its way, or items depend on it; says how many and what would free them.
        NothingToRetire: it was never deployed here, or is retired already and holds nothing.
        ChangedMeanwhile: see `lifecycle.lock`.
    """
    gallery = lock(connection, gallery_id, order.if_match)
    _check_unused(connection, catalog, gallery, version)
    mine = (deployment.c.gallery_id == gallery_id, deployment.c.version_id == version.id)
    held = connection.execute(_held(gallery_id, version.id)).scalar_one()
    ended = connection.execute(select(deployment).where(*mine, deployment.c.state.in_(ENDED))).all()
    if not ended:
        raise NothingToRetire(f"no deployment of version {version.name!r} has ended here", pointer="/version")
    checked = {"embeddings": held, "bytes": held * 4 * (version.card.dim + version.card.side_dim)}
    done = Order(order.who, order.why, checked=checked)
    for row in ended:
        moving = Moving(connection, catalog, gallery, row, done)
        move(moving, State.RETIRED)
        moving.change(to_free=held)
    return [row.id for row in ended]


def free(database: Database, gallery_id: int, version_id: int) -> None:
    """Free a retired version's embeddings, block by block; harmless when it is done already."""
    left = True
    while left:
        try:
            with database.write() as connection:
                left = _free_block(connection, gallery_id, version_id)
        except UnknownGallery:
            return  # it took everything with it


def resume(database: Database) -> None:
    """Go on with every retirement that a killed process left unfinished."""
    with database.lookup() as connection:
        columns = (deployment.c.gallery_id, deployment.c.version_id)
        rows = connection.execute(select(*columns).where(deployment.c.to_free.is_not(None)).distinct()).all()
    for row in rows:
        free(database, row.gallery_id, row.version_id)


def _free_block(connection: Connection, gallery_id: int, version_id: int) -> bool:
    """Free one block; False: that was the last."""
    take_seq(connection, gallery_id, 0)
    # An item that moved to the version meanwhile, by a deployment of another, keeps what it lives on.
    idle = _stored(gallery_id, version_id, item.c.active_id.is_distinct_from(version_id))
    keys = list(connection.execute(idle.limit(BLOCK)).scalars())
    connection.execute(delete(embedding).where(embedding.c.version_id == version_id, embedding.c.item_id.in_(keys)))
    mine = (deployment.c.gallery_id == gallery_id, deployment.c.version_id == version_id)
    left = deployment.c.to_free - len(keys) if len(keys) == BLOCK else None
    connection.execute(update(deployment).where(*mine, deployment.c.to_free.is_not(None)).values(to_free=left))
    return len(keys) == BLOCK


def _check_unused(connection: Connection, catalog: Catalog, gallery: Row[Any], version: Registered) -> None:
    if gallery.current_id == version.id:
        raise VersionInUse(f"version {version.name!r} is current: deploy another one first", pointer="/version")
    if (row := on_its_way(connection, gallery.id)) and row.version_id == version.id:
        raise VersionInUse(f"deployment {row.id} of {version.name!r} is {row.state}: roll it back first")
    depending = and_(item.c.gallery_id == gallery.id, item.c.deleted == false(), item.c.active_id == version.id)
    items = _count(connection, depending)
    if not items:
        return
    raise VersionInUse(
        f"{items} items depend on version {version.name!r}: {_way_out(connection, catalog, gallery, depending)}",
        pointer="/version",
    )


def _way_out(connection: Connection, catalog: Catalog, gallery: Row[Any], depending: ColumnElement[bool]) -> str:
    """What would move the items away, and how many of them."""
    current = catalog.by_id(gallery.current_id)
    ways: list[str] = []
    movable: ColumnElement[bool] = false()
    for kind in Kind:
        possible = kind is not Kind.REENCODE or bool(current.card.encoder)
        moves = QUALIFIES[kind](current.id) if possible else false()
        if count := _count(connection, and_(depending, moves)):
            ways.append(f"a {kind.value} backfill to {current.name!r} would move {count} of them")
            movable = movable | moves
    if stuck := _count(connection, and_(depending, ~movable)):
        ways.append(f"{stuck} can only be deleted, or ingested again")
    return "; ".join(ways)


def _count(connection: Connection, which: ColumnElement[bool]) -> int:
    return int(connection.execute(select(func.count()).select_from(item).where(which)).scalar_one())


def _stored(gallery_id: int, version_id: int, *which: ColumnElement[bool]) -> Select[int]:
    held = exists().where(embedding.c.item_id == item.c.id, embedding.c.version_id == version_id)
    return select(item.c.id).where(item.c.gallery_id == gallery_id, held, *which).order_by(item.c.id)


def _held(gallery_id: int, version_id: int) -> Select[int]:
    return select(func.count()).select_from(_stored(gallery_id, version_id).order_by(None).subquery())
