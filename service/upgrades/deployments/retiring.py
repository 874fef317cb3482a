"""Retire a version: free its embeddings and shards in one gallery, once no item depends on it.

`precheck` checks all items without a lock. The transaction of `retire` checks only items written since, or all of them
if the current version, the edges or the transform backfills changed meanwhile. `upgrades.deployments.reaper` then frees
the embeddings block by block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, and_, exists, false, func, select, true

from index.errors import RegraftError
from service.backfills.states import ACTIVE, Kind
from service.backfills.waiting import QUALIFIES, read_version, waiting_items
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import placement_in, version_order_to
from service.registry.registry import Registry
from service.store.database.connections import Database
from service.store.galleries import partitions
from service.store.galleries.embeddings import first_held
from service.store.galleries.gallery import gallery_named
from service.store.rows import EMPTIED, BackfillRow, DeploymentRow, GalleryRow, all_of
from service.store.sql.arrays import select_keys
from service.store.sql.partitioned import of_item
from service.store.tables import backfill, backfill_failure, deployment, embedding, item
from service.upgrades.deployments.history import DeploymentState, check_unchanged, on_its_way
from service.upgrades.deployments.lifecycle import begin_retired, lock, move
from service.upgrades.deployments.transition import TransitionContext, TransitionRequest

ENDED = (DeploymentState.SUPERSEDED, DeploymentState.ROLLED_BACK)


class VersionInUse(RegraftError):
    """The version is current, being deployed, or items depend on it."""

    status = 409
    code = "version_in_use"


class NothingToRetire(RegraftError):
    """No deployment of this version has ended in this gallery, and no item has an embedding by it."""

    status = 409
    code = "nothing_to_retire"


@dataclass(frozen=True)
class Precheck:
    """The result of `precheck`: no item depended on the version then.

    Attributes:
        seq: the next number of the gallery's feed then.
        basis: the other state that decides which items depend on a version.
        holders: keys of the items that held an embedding of the version, ascending.
    """

    seq: int
    basis: tuple[object, ...]
    holders: NDArray[np.int64]


def precheck(
    database: Database, registry: Registry, gallery_name: str, version: LoadedVersion, if_match: str | None
) -> Precheck:
    """Check all items of a gallery before a version is retired, without its lock.

    Raises:
        UnknownGallery: there is none of this name.
        VersionInUse, ChangedMeanwhile: as `retire`.
    """
    registry.sync_edges()
    with database.read() as connection:
        gallery = gallery_named(connection, gallery_name)
        check_unchanged(connection, gallery.id, if_match)
        _check_unused(connection, registry, gallery, version, since=0)
        holders = select_keys(connection, select(item.c.id).where(holds_version(gallery.id, version.id)))
        return Precheck(gallery.next_seq, _basis(connection, registry, gallery), holders)


def retire(
    connection: Connection,
    registry: Registry,
    gallery_id: int,
    version: LoadedVersion,
    request: TransitionRequest,
    prechecked: Precheck,
) -> list[int]:
    """Mark every ended deployment of a version as retired; returns their numbers. The `Reaper` frees the embeddings.

    If the embeddings came with items, as the version is retired already or was never deployed here, a deployment that
    begins as retired records their freeing. While embeddings are being freed, a repeated call is the same retirement.

    Raises:
        VersionInUse: it is current, on its way, or items depend on it; says how many, and what would move them.
        NothingToRetire: no deployment of it has ended here, and no item holds an embedding of it.
        ChangedMeanwhile: see `lifecycle.lock`.
    """
    gallery = lock(connection, gallery_id, request.if_match)
    # A removal of an edge locks every gallery first: the edges known now stay until this commit.
    registry.sync_edges()
    since = prechecked.seq if prechecked.basis == _basis(connection, registry, gallery) else 0
    _check_unused(connection, registry, gallery, version, since)
    conditions = (deployment.c.gallery_id == gallery_id, deployment.c.version_id == version.id)
    statement = select(deployment).where(*conditions, deployment.c.state.in_(ENDED))
    ended = all_of(DeploymentRow, connection.execute(statement))
    under_way = select(deployment.c.id).where(*conditions, deployment.c.to_free.is_not(None)).order_by(deployment.c.id)
    if not ended and (numbers := list(connection.execute(under_way).scalars())):
        return numbers
    embeddings = _count_embeddings(connection, gallery_id, version.id, prechecked)
    if not ended and not embeddings:
        raise NothingToRetire(f"the gallery has no ended deployment of version {version.name!r}", pointer="/version")
    checked = {"embeddings": embeddings, "bytes": embeddings * 4 * (version.card.dim + version.card.side_dim)}
    done = TransitionRequest(request.who, request.item_counts, request.why, checked=checked)
    retired = [TransitionContext(connection, registry, gallery, row, done) for row in ended]
    for transition in retired:
        move(transition, DeploymentState.RETIRED)
    if not retired:  # these embeddings came with items: the version is retired already, or was never deployed here
        retired = [begin_retired(connection, registry, gallery, version, done)]
    emptied = embeddings and partitions.empty(connection, gallery_id, version.id)
    for transition in retired:
        transition.change(to_free=EMPTIED if emptied else embeddings)
    return [transition.row.id for transition in retired]


def _check_unused(
    connection: Connection, registry: Registry, gallery: GalleryRow, version: LoadedVersion, since: int
) -> None:
    """Raise VersionInUse if the version is needed; items are checked from feed number `since` on."""
    if gallery.current_id == version.id:
        raise VersionInUse(f"version {version.name!r} is current: deploy another one first", pointer="/version")
    if (row := on_its_way(connection, gallery.id)) and row.version_id == version.id:
        raise VersionInUse(f"deployment {row.id} of {version.name!r} is {row.state}: roll it back first")
    served = first_held(placement_in(registry, gallery).version_order)
    conditions = (item.c.gallery_id == gallery.id, item.c.seq >= since, item.c.deleted == false())
    depending = and_(*conditions, served == version.id)
    if items := _count(connection, depending):
        way_out = _way_out(connection, registry, gallery, depending)
        raise VersionInUse(f"{items} items depend on version {version.name!r}: {way_out}", pointer="/version")
    _check_unread(connection, registry, gallery, version, since)


def _check_unread(
    connection: Connection, registry: Registry, gallery: GalleryRow, version: LoadedVersion, since: int
) -> None:
    """Raise VersionInUse if an active transform backfill has yet to read embeddings of the version."""
    for job, order in _transforming(connection, registry, gallery):
        waiting = waiting_items(gallery.id, Kind.TRANSFORM, job.version_id, order)
        reads = read_version(Kind.TRANSFORM, job.version_id, order) == version.id
        if items := _count(connection, and_(waiting, item.c.seq >= since, reads)):
            why = f"backfill {job.id} is {job.state} and reads {items} embeddings of {version.name!r}"
            raise VersionInUse(f"{why}: wait for it or cancel it", pointer="/version")


def _count_embeddings(connection: Connection, gallery_id: int, version_id: int, prechecked: Precheck) -> int:
    """How many items hold an embedding of the version; only those written since the precheck are read."""
    is_written = item.c.seq >= prechecked.seq
    written = select_keys(connection, select(item.c.id).where(item.c.gallery_id == gallery_id, is_written))
    unchanged = np.setdiff1d(prechecked.holders, written, assume_unique=True)
    return len(unchanged) + _count(connection, and_(holds_version(gallery_id, version_id), is_written))


def _basis(connection: Connection, registry: Registry, gallery: GalleryRow) -> tuple[object, ...]:
    jobs = [(job.id, order) for job, order in _transforming(connection, registry, gallery)]
    return gallery.current_id, placement_in(registry, gallery).version_order, *jobs


def _transforming(
    connection: Connection, registry: Registry, gallery: GalleryRow
) -> list[tuple[BackfillRow, tuple[int, ...]]]:
    """The active transform backfills of a gallery, and the order of versions in which each reads an item."""
    conditions = (backfill.c.gallery_id == gallery.id, backfill.c.kind == Kind.TRANSFORM, backfill.c.state.in_(ACTIVE))
    jobs = all_of(BackfillRow, connection.execute(select(backfill).where(*conditions).order_by(backfill.c.id)))
    return [(job, version_order_to(registry, job.version_id)) for job in jobs]


def _way_out(connection: Connection, registry: Registry, gallery: GalleryRow, depending: ColumnElement[bool]) -> str:
    """Describe what would move the items to the current version, and how many of them."""
    current = registry.current_of(gallery)
    ways: list[str] = []
    movable: ColumnElement[bool] = false()
    for kind in Kind:
        given_up = _given_up(kind, current.id)
        moves = and_(QUALIFIES[kind](current.id), ~given_up)
        if count := _count(connection, and_(depending, moves)):
            ways.append(f"a {kind.value} backfill to {current.name!r} would move {count} of them")
            movable = movable | moves
        if count := _count(connection, and_(depending, given_up)):
            ways.append(f"a {kind.value} backfill failed for {count} of them: see its failures")
    if stuck := _count(connection, and_(depending, ~movable)):
        supplied = f"given embeddings by {current.name!r} made elsewhere"
        ways.append(f"{stuck} can only be {supplied}, ingested again or deleted")
    return "; ".join(ways)


def _given_up(kind: Kind, version_id: int) -> ColumnElement[bool]:
    """Items that such a backfill gave up and that were not written since; a write makes a retry worthwhile."""
    jobs = select(backfill.c.id).where(backfill.c.kind == kind, backfill.c.version_id == version_id)
    return exists().where(
        backfill_failure.c.item_id == item.c.id,
        backfill_failure.c.backfill_id.in_(jobs),
        backfill_failure.c.final == true(),
        backfill_failure.c.seq == item.c.seq,
    )


def _count(connection: Connection, which: ColumnElement[bool]) -> int:
    return int(connection.execute(select(func.count()).select_from(item).where(which)).scalar_one())


def holds_version(gallery_id: int, version_id: int) -> ColumnElement[bool]:
    """Which rows of `item` are the gallery's and hold an embedding of a version."""
    return and_(item.c.gallery_id == gallery_id, exists().where(of_item(), embedding.c.version_id == version_id))
