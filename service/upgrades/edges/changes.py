"""Accept and remove edges: one transaction each, of a few rows, however many items there are.

Which embedding serves an item follows from the current version, the edges and the embeddings that the item holds
(`service.registry.placement`). So adding or removing an edge may change which embedding serves items that hold several.
The embeddings that a transform backfill made stay when its edge is removed.
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from index.durable import sync_all
from index.edges.graph import Graph
from index.errors import InvalidArgument, RegraftError, shortened
from index.events import Event
from index.version import EdgeKey, EdgeKind
from index.version_folder.folder import files_of
from service.backfills.states import ACTIVE, Kind
from service.errors import DeletedMeanwhile
from service.registry.calibrations import forget_edge
from service.registry.edge_records import EdgeRecord, delete_edge, insert_edge
from service.registry.fetched_folders import edge_key
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import preference
from service.registry.registry import Registry
from service.replica.replica import Replica
from service.store.audit import ChangeContext, record
from service.store.database.connections import Database
from service.store.galleries.gallery import lock_galleries, take_seq
from service.store.rows import GalleryRow
from service.store.tables import backfill, version
from service.upgrades.edges.dependents import Counts, Dependent, Uncounted, without

logger = logging.getLogger(__name__)

_lock = threading.Lock()


class UnknownEdge(RegraftError):
    """The edge does not exist."""

    status = 404
    code = "unknown_edge"


class EdgeExists(RegraftError):
    """An edge of this kind between the two versions already exists."""

    status = 409
    code = "edge_exists"


class EdgeNeeded(RegraftError):
    """Without this edge, queries could not reach some items."""

    status = 409
    code = "edge_needed"


class EdgeInUse(RegraftError):
    """A backfill uses this edge."""

    status = 409
    code = "edge_in_use"


@dataclass(frozen=True)
class Removal:
    """The effect of a removal, or of its dry run; `blocked_by`: the active transform backfills that apply the edge."""

    edge: EdgeRecord
    dependents: tuple[Dependent, ...]
    blocked_by: tuple[int, ...]


def both_versions(registry: Registry, new: str, old: str) -> tuple[LoadedVersion, LoadedVersion]:
    """The two versions of a new edge. Raises UnknownVersion; InvalidArgument if they are the same."""
    if new == old:
        raise InvalidArgument("new and old must be different versions", pointer="/old")
    return registry.named(new), registry.named(old)


def check_no_edge(registry: Registry, key: EdgeKey, replacing: bool) -> None:
    """Raise EdgeExists if there is an edge of this key and `replacing` is false."""
    if not replacing and registry.edge(key) is not None:
        new, old, kind = key
        raise EdgeExists(
            f"an edge of kind {kind} from {new!r} to {old!r} already exists; replace=true replaces it",
            pointer="/kind",
        )


def accept(
    database: Database,
    registry: Registry,
    replica: Replica,
    edge_record: EdgeRecord,
    ends: tuple[LoadedVersion, LoadedVersion],
    context: ChangeContext,
    *,
    replacing: bool = False,
) -> EdgeRecord:
    """Store a checked edge; its folder, if it has one, is moved to the service's folder of edges.

    `ends`: the new and the old version between which it was fitted or checked, perhaps minutes ago. A dry run returns
    `edge_record` itself.

    Raises:
        DeletedMeanwhile: one of them was deleted, and another version registered by its name.
        EdgeExists: there is an edge of this key, and `replacing` is false.
        EdgeInUse: an active backfill applies the edge to be replaced: each would move a part of its items.
    """
    edge = edge_record.edge
    incoming, folder_key = edge.folder, "/".join((*edge.key, uuid.uuid4().hex))
    stored = replace(edge_record, files={} if incoming is None else files_of(incoming))
    if incoming is not None and not context.dry_run:
        registry.folders.put(incoming, edge_key(folder_key))  # before the row: its readers may be on another machine
    with _lock:
        with database.write(dry_run=context.dry_run) as connection:
            galleries = _lock_galleries(connection)
            registry.sync()
            check_no_edge(registry, edge.key, replacing)
            previous = registry.edge(edge.key)
            if previous is not None:
                _check_unused(_applied_by(connection, previous))
                _forget(connection, previous)
            new, old = (registry.named(name) for name in (edge.new, edge.old))
            if (new.id, old.id) != tuple(end.id for end in ends):
                raise DeletedMeanwhile
            try:
                added = insert_edge(connection, new.id, old.id, stored, None if incoming is None else folder_key)
            except IntegrityError:  # another process accepted one at the same moment
                raise EdgeExists("an edge of this kind was added at the same time", pointer="/kind") from None
            replaced = None if previous is None else previous.id
            subject = "/".join(edge.key)
            record(connection, context.who, f"edge_{edge_record.origin}", subject, edge=added.id, replaced=replaced)
            _take_numbers(connection, registry, galleries, Graph((*registry.graph().edges, edge)))
            if incoming is not None and not context.dry_run:
                # Before the commit: at worst, a crash leaves a folder here that no row names.
                _rename(incoming, registry.edges_folder / folder_key)
        if context.dry_run:
            return edge_record
        forget_files(registry, previous)
    _refresh(registry, replica)
    # The registry lacks it if another process has removed it since.
    return next((record for record in registry.edges() if record.id == added.id), added)


def _rename(folder: Path, final: Path) -> None:
    """Rename a folder so that it outlives a crash of the machine."""
    final.parent.mkdir(parents=True, exist_ok=True)
    sync_all([folder, *folder.iterdir()])
    folder.rename(final)
    sync_all([final.parent])


def _forget(connection: Connection, edge_record: EdgeRecord) -> None:
    """Delete the rows of an edge."""
    delete_edge(connection, edge_record.id)
    forget_edge(connection, edge_record.edge.key)


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
    """Remove an edge; a dry run only determines the effect.

    Raises:
        UnknownEdge: there is no edge of this key.
        EdgeInUse: an active backfill applies it.
        EdgeNeeded: items of a gallery would become unreachable, and `force` is false.
        InvalidArgument: `force` without a reason.
    """
    if force and not reason.strip():
        raise InvalidArgument("force requires a reason why these items may become unreachable", pointer="/reason")
    counts = Counts(database, registry, replica, key)
    with _lock:
        removal: Removal | None = None
        while removal is None:
            try:
                removal = _remove(database, registry, key, context, counts, force=force, reason=reason)
            except Uncounted as uncounted:
                counts.count(uncounted.galleries)
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
    """The transaction of a removal. Raises Uncounted: galleries must first be counted without locks."""
    with database.write(dry_run=context.dry_run) as connection:
        galleries = _lock_galleries(connection)
        registry.sync()
        edge_record = find(registry, key)
        dependents = counts.of(connection, galleries)
        removal = Removal(edge_record, dependents, _applied_by(connection, edge_record))
        if not context.dry_run:
            _check(removal, force)
            _forget(connection, edge_record)
            _take_numbers(connection, registry, galleries, without(registry, key))
            evidence = {"edge": edge_record.id, "forced": force, "moved": sum(d.moved for d in dependents)}
            evidence["lost"] = sum(d.lost for d in dependents)
            record(connection, context.who, "edge_removed", "/".join(key), reason, **evidence)
    return removal


def find(registry: Registry, key: EdgeKey) -> EdgeRecord:
    """The edge of a key. Raises UnknownEdge."""
    edge_record = registry.edge(key)
    if edge_record is None:
        new, old, kind = map(shortened, key)
        kinds = [d.edge.kind.value for d in registry.edges() if d.edge.key[:2] == key[:2]]
        raise UnknownEdge(
            f"no edge of kind {kind!r} leads from {new!r} to {old!r} (existing kinds: {', '.join(kinds) or 'none'})"
        )
    return edge_record


def _lock_galleries(connection: Connection) -> list[GalleryRow]:
    """Lock all galleries until the commit, against deployments and writes; returns those with a current version."""
    return [row for row in lock_galleries(connection) if row.current_id is not None]


def _take_numbers(connection: Connection, registry: Registry, galleries: Sequence[GalleryRow], graph: Graph) -> None:
    """Take a feed number of each gallery in which the edges of `graph` may change the embedding that serves an item."""
    current_versions = {registry.current_of(gallery) for gallery in galleries}
    affected = {v.id for v in current_versions if preference(registry, v) != preference(registry, v, graph)}
    for gallery in galleries:
        if gallery.current_id in affected:
            take_seq(connection, gallery.id, 1)


def _applied_by(connection: Connection, edge_record: EdgeRecord) -> tuple[int, ...]:
    if edge_record.edge.kind is not EdgeKind.FORWARD:
        return ()
    new = select(version.c.id).where(version.c.name == edge_record.edge.new).scalar_subquery()
    condition = backfill.c.version_id == new
    active = select(backfill.c.id).where(condition, backfill.c.kind == Kind.TRANSFORM, backfill.c.state.in_(ACTIVE))
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
        raise EdgeInUse(f"backfill {numbers} uses this edge: wait for it or cancel it")


def forget_files(registry: Registry, edge_record: EdgeRecord | None) -> None:
    """Remove the folder of a removed edge, unless that folder is a part of a version's."""
    if edge_record is not None and edge_record.files and (folder := edge_record.edge.folder) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        registry.folders.remove(edge_key(folder.relative_to(registry.edges_folder).as_posix()))


def _refresh(registry: Registry, replica: Replica) -> None:
    """Apply the change in this process at once; other processes follow the feeds."""
    registry.sync()
    for loaded in replica.all():
        replica.refresh(loaded.id)
