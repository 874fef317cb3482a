"""Retiring a version: free its embeddings and shards in one gallery, once no item depends on it.

The decision is one transaction; the embeddings then go block by block, so that writers are not kept waiting. A process
that is killed in between leaves a deployment with `to_free`, and the next one that starts goes on.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, delete, exists, false, func, select, true, update

from index.errors import RegraftError
from service.backfills.planner import ACTIVE, QUALIFIES, Kind, source_of, waiting_items
from service.database import Database
from service.deployments.history import State, on_its_way
from service.deployments.lifecycle import Moving, Order, begin_retired, lock, move
from service.errors import UnknownGallery
from service.repository import take_seq
from service.tables import backfill, backfill_failure, deployment, embedding, item
from service.versions.catalog import Catalog, Registered

BLOCK = 5_000
"""Embeddings freed in one transaction."""

ENDED = (State.SUPERSEDED, State.ROLLED_BACK)


class VersionInUse(RegraftError):
    """The version is current, being deployed, or items depend on it."""

    status = 409
    code = "version_in_use"


class NothingToRetire(RegraftError):
    """No deployment of this version has ended in this gallery, and no item holds an embedding of it."""

    status = 409
    code = "nothing_to_retire"


def retire(connection: Connection, catalog: Catalog, gallery_id: int, version: Registered, order: Order) -> list[int]:
    """Mark every ended deployment of a version as retired; returns their numbers. `free` does the rest.

    Embeddings that came with items, of a version that is retired already or never was deployed here, go by a deployment
    that begins as retired.

    Raises:
        VersionInUse: it is current, on its way, or items depend on it; says how many and what would free them.
        NothingToRetire: no deployment of it has ended here, and no item holds an embedding of it.
        ChangedMeanwhile: see `lifecycle.lock`.
    """
    gallery = lock(connection, gallery_id, order.if_match)
    _check_unused(connection, catalog, gallery, version)
    mine = (deployment.c.gallery_id == gallery_id, deployment.c.version_id == version.id)
    held = connection.execute(_held(gallery_id, version.id)).scalar_one()
    ended = connection.execute(select(deployment).where(*mine, deployment.c.state.in_(ENDED))).all()
    if not ended and not held:
        raise NothingToRetire(f"no deployment of version {version.name!r} has ended here", pointer="/version")
    checked = {"embeddings": held, "bytes": held * 4 * (version.card.dim + version.card.side_dim)}
    done = Order(order.who, order.why, checked=checked)
    retired = [Moving(connection, catalog, gallery, row, done) for row in ended]
    for moving in retired:
        move(moving, State.RETIRED)
    if not retired:  # items brought these embeddings along: retired already, or never deployed here
        retired = [begin_retired(connection, catalog, gallery, version, done)]
    for moving in retired:
        moving.change(to_free=held)
    return [moving.row.id for moving in retired]


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
    if items := _count(connection, depending):
        way_out = _way_out(connection, catalog, gallery, depending)
        raise VersionInUse(f"{items} items depend on version {version.name!r}: {way_out}", pointer="/version")
    _check_unread(connection, gallery, version)


def _check_unread(connection: Connection, gallery: Row[Any], version: Registered) -> None:
    """What a transform backfill has still to read must not go while it runs."""
    mine = (backfill.c.gallery_id == gallery.id, backfill.c.kind == Kind.TRANSFORM, backfill.c.state.in_(ACTIVE))
    for job in connection.execute(select(backfill).where(*mine)):
        reads = source_of(job.version_id) == version.id
        if items := _count(connection, and_(waiting_items(gallery.id, Kind.TRANSFORM, job.version_id), reads)):
            why = f"backfill {job.id} is {job.state} and reads {items} embeddings of {version.name!r}"
            raise VersionInUse(f"{why}: let it end, or cancel it", pointer="/version")


def _way_out(connection: Connection, catalog: Catalog, gallery: Row[Any], depending: ColumnElement[bool]) -> str:
    """What would move the items away, and how many of them."""
    current = catalog.by_id(gallery.current_id)
    ways: list[str] = []
    movable: ColumnElement[bool] = false()
    for kind in Kind:
        possible = kind is not Kind.REENCODE or bool(current.card.encoder)
        given_up = _given_up(kind, current.id)
        moves = and_(QUALIFIES[kind](current.id), ~given_up) if possible else false()
        if count := _count(connection, and_(depending, moves)):
            ways.append(f"a {kind.value} backfill to {current.name!r} would move {count} of them")
            movable = movable | moves
        if count := _count(connection, and_(depending, given_up)):
            ways.append(f"a {kind.value} backfill gave up {count} of them, and its failures say why")
    if stuck := _count(connection, and_(depending, ~movable)):
        ways.append(f"{stuck} can only be deleted, or ingested again")
    return "; ".join(ways)


def _given_up(kind: Kind, version_id: int) -> ColumnElement[bool]:
    """Items that such a backfill could not move as they are; written since, they are worth another attempt."""
    jobs = select(backfill.c.id).where(backfill.c.kind == kind, backfill.c.version_id == version_id)
    return exists().where(
        backfill_failure.c.item_id == item.c.id,
        backfill_failure.c.backfill_id.in_(jobs),
        backfill_failure.c.final == true(),
        backfill_failure.c.seq == item.c.seq,
    )


def _count(connection: Connection, which: ColumnElement[bool]) -> int:
    return int(connection.execute(select(func.count()).select_from(item).where(which)).scalar_one())


def _stored(gallery_id: int, version_id: int, *which: ColumnElement[bool]) -> Select[int]:
    held = exists().where(embedding.c.item_id == item.c.id, embedding.c.version_id == version_id)
    return select(item.c.id).where(item.c.gallery_id == gallery_id, held, *which).order_by(item.c.id)


def _held(gallery_id: int, version_id: int) -> Select[int]:
    return select(func.count()).select_from(_stored(gallery_id, version_id).order_by(None).subquery())
