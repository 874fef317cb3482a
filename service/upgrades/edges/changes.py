"""Accepting and removing edges: one transaction each, of a few rows, however many items there are.

Which embedding serves an item follows from the current version, the edges and what the item holds
(`service.registry.placement`). So when an edge comes or goes, items that hold embeddings of several versions may be
served by another; what a transform backfill made of an item stays, whatever becomes of the edge that made it.
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from index.durable import sync_all
from index.errors import InvalidArgument, RegraftError
from index.events import Event
from index.folder import files_of
from index.graph import Graph
from index.version import EdgeKey, EdgeKind
from service.backfills.planner import ACTIVE, Kind
from service.errors import UnknownGallery
from service.registry.brought import edge_key
from service.registry.calibrations import forget_edge
from service.registry.edge_records import EdgeRecord, delete_edge, insert_edge
from service.registry.placement import preference
from service.registry.registry import Registry
from service.replica.replica import Replica
from service.store.audit import ChangeContext, record
from service.store.database import Database
from service.store.repository import all_galleries, take_seq
from service.store.rows import GalleryRow
from service.store.tables import backfill, version
from service.upgrades.edges.dependents import Counts, Dependent, Uncounted, without

logger = logging.getLogger(__name__)

_changing = threading.Lock()


class UnknownEdge(RegraftError):
    """There is no such edge."""

    status = 404
    code = "unknown_edge"


class EdgeExists(RegraftError):
    """There is an edge of this kind between the two versions already."""

    status = 409
    code = "edge_exists"


class EdgeNeeded(RegraftError):
    """Without this edge, queries could not reach some items."""

    status = 409
    code = "edge_needed"


class EdgeInUse(RegraftError):
    """A backfill applies this edge."""

    status = 409
    code = "edge_in_use"


@dataclass(frozen=True)
class Removal:
    """What a removal did, or would do: `blocked_by` are the transform backfills that apply the edge."""

    edge: EdgeRecord
    dependents: tuple[Dependent, ...]
    blocked_by: tuple[int, ...]


def check_free(registry: Registry, key: EdgeKey, replacing: bool) -> None:
    """Raise EdgeExists when there is an edge of this key and it is not to be replaced."""
    if not replacing and registry.edge(key) is not None:
        new, old, kind = key
        raise EdgeExists(
            f"there is an edge of kind {kind} from {new!r} to {old!r} already; replace=true puts this one in its place",
            pointer="/kind",
        )


def accept(
    database: Database,
    registry: Registry,
    replica: Replica,
    declared: EdgeRecord,
    context: ChangeContext,
    *,
    replacing: bool = False,
) -> EdgeRecord:
    """Make an edge, everything about it checked, known for good; its folder, if it has one, becomes the service's.

    A dry run gives the edge back as it came.

    Raises:
        EdgeExists: there is one of its key, and it is not to be replaced.
        EdgeInUse: a running or paused backfill applies the one it would replace: half its items would be moved by each.
    """
    edge = declared.edge
    incoming = edge.folder
    place = None if incoming is None else "/".join((*edge.key, uuid.uuid4().hex))
    files = {} if incoming is None else files_of(incoming)
    if incoming is not None and place is not None and not context.dry_run:
        registry.folders.keep(incoming, edge_key(place))  # before the row: who reads that may be on another machine
    with _changing:
        with database.write(dry_run=context.dry_run) as connection:
            galleries = _lock_galleries(connection)
            registry.sync()
            check_free(registry, edge.key, replacing)
            before = registry.edge(edge.key)
            if before is not None:
                _check_unused(_applied_by(connection, before))
                delete_edge(connection, before.id)
                forget_edge(connection, edge.key)
            new, old = (registry.named(name) for name in (edge.new, edge.old))
            try:
                added = insert_edge(connection, new.id, old.id, replace(declared, files=files), place)
            except IntegrityError:  # another replica's, at the same moment
                raise EdgeExists("there is an edge of this kind since this moment", pointer="/kind") from None
            replaced = None if before is None else before.id
            subject = "/".join(edge.key)
            record(connection, context.who, f"edge_{declared.origin}", subject, edge=added.id, replaced=replaced)
            _tell(connection, registry, galleries, Graph((*registry.graph().edges, edge)))
            if incoming is not None and place is not None and not context.dry_run:
                # Not committed yet: at worst a crash leaves a folder here that no row names.
                final = registry.edges_folder / place
                final.parent.mkdir(parents=True, exist_ok=True)
                sync_all([incoming, *incoming.iterdir()])
                incoming.rename(final)
                sync_all([final.parent])
        if context.dry_run:
            return declared
        forget_files(registry, before)
    _refresh(registry, replica)
    # It may have been removed since: then it is what was added.
    return next((record for record in registry.edges() if record.id == added.id), added)


def remove(
    database: Database,
    registry: Registry,
    replica: Replica,
    key: EdgeKey,
    context: ChangeContext,
    *,
    force: bool,
    reason: str,
) -> Removal:
    """Remove an edge, or as a dry run only find out what that would do.

    Raises:
        UnknownEdge: there is none of this key.
        EdgeInUse: a running or paused backfill applies it.
        EdgeNeeded: items of some gallery could not be reached any more, and it is not forced.
        InvalidArgument: forced without a reason.
    """
    if force and not reason.strip():
        raise InvalidArgument("force needs a reason: say why these items may become unreachable", pointer="/reason")
    counts = Counts(database, registry, replica, key)
    with _changing:
        removal: Removal | None = None
        while removal is None:
            try:
                removal = _remove(database, registry, key, context, counts, force=force, reason=reason)
            except Uncounted as late:
                counts.count(late.galleries)
        if not context.dry_run:
            forget_files(registry, removal.edge)
    if not context.dry_run:
        logger.warning(Event("edge_removed", edge=key, forced=force, reason=reason))
        _refresh(registry, replica)
    return removal


def _remove(
    database: Database,
    registry: Registry,
    key: EdgeKey,
    context: ChangeContext,
    counts: Counts,
    *,
    force: bool,
    reason: str,
) -> Removal:
    """The transaction of it. Raises Uncounted: galleries have to be counted first, while nobody waits."""
    with database.write(dry_run=context.dry_run) as connection:
        galleries = _lock_galleries(connection)
        registry.sync()
        declared = find(registry, key)
        touched = counts.of(connection, galleries)
        removal = Removal(declared, touched, _applied_by(connection, declared))
        if not context.dry_run:
            _check(removal, force)
            delete_edge(connection, declared.id)
            forget_edge(connection, key)
            _tell(connection, registry, galleries, without(registry, key))
            done = {"edge": declared.id, "forced": force, "moved": sum(d.moved for d in touched)}
            done["lost"] = sum(d.lost for d in touched)
            record(connection, context.who, "edge_removed", "/".join(key), reason, **done)
    return removal


def find(registry: Registry, key: EdgeKey) -> EdgeRecord:
    """The edge of a key. Raises UnknownEdge."""
    declared = registry.edge(key)
    if declared is None:
        new, old, kind = key
        there = [d.edge.kind.value for d in registry.edges() if d.edge.key[:2] == (new, old)]
        raise UnknownEdge(
            f"there is no edge of kind {kind!r} from {new!r} to {old!r} (there are: {', '.join(there) or 'none'})"
        )
    return declared


def _lock_galleries(connection: Connection) -> list[GalleryRow]:
    """Every gallery that has a current version, ours until the commit: nobody deploys or writes meanwhile."""
    for row in all_galleries(connection):
        with suppress(UnknownGallery):  # deleted since
            take_seq(connection, row.id, 0)
    return [row for row in all_galleries(connection) if row.current_id is not None]


def _tell(connection: Connection, registry: Registry, galleries: Sequence[GalleryRow], graph: Graph) -> None:
    """Take a number of the feed where other embeddings may serve with these edges: from there on answers differ."""
    for gallery in galleries:
        current = registry.current_of(gallery)
        if preference(registry, current) != preference(registry, current, graph):
            take_seq(connection, gallery.id, 1)


def _applied_by(connection: Connection, declared: EdgeRecord) -> tuple[int, ...]:
    if declared.edge.kind is not EdgeKind.FORWARD:
        return ()
    new = select(version.c.id).where(version.c.name == declared.edge.new).scalar_subquery()
    mine = backfill.c.version_id == new
    active = select(backfill.c.id).where(mine, backfill.c.kind == Kind.TRANSFORM, backfill.c.state.in_(ACTIVE))
    return tuple(connection.execute(active.order_by(backfill.c.id)).scalars())


def _check(removal: Removal, force: bool) -> None:
    _check_unused(removal.blocked_by)
    lost = [f"{d.gallery!r} ({d.lost} items)" for d in removal.dependents if d.lost > 0]
    if lost and not force:
        raise EdgeNeeded(
            f"without this edge no route leads to items of {', '.join(lost)}; force=true with a reason removes it",
            pointer="/force",
        )


def _check_unused(backfills: Sequence[int]) -> None:
    if backfills:
        numbers = ", ".join(map(str, backfills))
        raise EdgeInUse(f"backfill {numbers} applies this edge: let it end, or cancel it")


def forget_files(registry: Registry, declared: EdgeRecord | None) -> None:
    """Remove the folder of an edge that is gone, where it has one of its own."""
    if declared is not None and declared.files and (folder := declared.edge.folder) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        registry.folders.forget(edge_key(folder.relative_to(registry.edges_folder).as_posix()))


def _refresh(registry: Registry, replica: Replica) -> None:
    """Show it here at once; other processes look for themselves."""
    registry.sync()
    for live in replica.all():
        replica.refresh(live.id)
