"""Delete an unused version with the edges from it; see `remove`.

The folder is renamed within the transaction and removed after it. A crash in between leaves a registered version
without a folder, which is quarantined like a damaged one: delete it again, or register it again from its archive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Select, delete, or_, select
from sqlalchemy.exc import IntegrityError

from index.durable import sync_all
from index.errors import RegraftError, shortened
from index.incoming import incoming_folder
from service.errors import UnknownVersion
from service.registry.edge_records import delete_edge
from service.registry.fetched_folders import version_key
from service.registry.registry import Registry
from service.store.audit import ChangeContext, record
from service.store.database.connections import Database
from service.store.rows import VersionRow, first_of
from service.store.tables import (
    backfill,
    calibration,
    deployment,
    edge,
    embedding,
    evaluation,
    evaluation_embedding,
    gallery,
    gate_report,
    item,
    version,
)
from service.upgrades.edges.changes import forget_files

MAX_NAMED = 5
"""How many dependents of each kind a refusal names."""


class VersionNeeded(RegraftError):
    """The version is in use."""

    status = 409
    code = "version_needed"


def remove(versions: Path, database: Database, registry: Registry, name: str, context: ChangeContext) -> None:
    """Delete a version and its folder below `versions`; a dry run only checks whether that is possible.

    Raises:
        UnknownVersion: no version has this name.
        VersionNeeded: something depends on it; names what.
    """
    with registry.folders_lock, incoming_folder(versions) as place:
        registry.sync()
        own = [declared for declared in registry.edges() if declared.edge.new == name]
        with (
            _aside(versions / name, place / "deleted") as put_aside,
            database.write(dry_run=context.dry_run) as connection,
        ):
            row = _unused(connection, name)
            for declared in own:
                delete_edge(connection, declared.id)
            try:
                connection.execute(delete(version).where(version.c.id == row.id))
            except IntegrityError as error:
                raise VersionNeeded(f"version {name!r} came into use at the same time") from error
            record(connection, context.who, "version_deleted", name, card_sha256=row.card_sha256, edges=len(own))
            if not context.dry_run:
                put_aside()
    if not context.dry_run:
        for declared in own:
            forget_files(registry, declared)
        registry.folders.remove(version_key(row.card_sha256))
        registry.sync()


@contextmanager
def _aside(final: Path, aside: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that moves the folder `final` to `aside`; if anything fails later, it is moved back."""

    def put() -> None:
        if final.exists():  # a version whose folder is lost can be deleted too
            final.rename(aside)
            sync_all([final.parent])

    try:
        yield put
    except BaseException:
        if aside.exists():
            aside.rename(final)
        raise


def _unused(connection: Connection, name: str) -> VersionRow:
    """The row of a version that nothing depends on. Raises UnknownVersion, VersionNeeded."""
    row = first_of(VersionRow, connection.execute(select(version).where(version.c.name == name)))
    if row is None:
        raise UnknownVersion(f"version {shortened(name)!r} is not registered")
    used = [f"{what} {_shortened(names)}" for what, names in dependents(connection, row.id).items() if names]
    if used:
        raise VersionNeeded(f"version {name!r} cannot be deleted because it is used by {'; '.join(used)}")
    return row


def dependents(connection: Connection, version_id: int) -> dict[str, Sequence[str]]:
    """The names of what depends on a version, by kind: with any of these it cannot be deleted."""

    def galleries(*conditions: tuple[Column[int], ColumnElement[bool]]) -> Sequence[str]:
        used = or_(*(gallery.c.id.in_(select(key).where(condition)) for key, condition in conditions))
        return names(select(gallery.c.name).where(used))

    def names(found: Select[Any]) -> Sequence[str]:
        return sorted(map(str, connection.execute(found.distinct()).scalars()))

    was_current = (deployment.c.version_id == version_id) | (deployment.c.previous_id == version_id)
    mapped = (calibration.c.query_id == version_id) | (calibration.c.item_id == version_id)
    holding = item.c.id.in_(select(embedding.c.item_id).where(embedding.c.version_id == version_id))
    newer = version.c.id.in_(select(edge.c.new_id).where(edge.c.old_id == version_id))
    measured = select(evaluation_embedding.c.evaluation_id).where(evaluation_embedding.c.version_id == version_id)
    return {
        "deployments in galleries": galleries(
            (gallery.c.id, gallery.c.current_id == version_id), (deployment.c.gallery_id, was_current)
        ),
        "items of galleries": galleries((item.c.gallery_id, holding)),
        "edges from versions": names(select(version.c.name).where(newer)),
        "gates of galleries": galleries(
            (gate_report.c.gallery_id, gate_report.c.version_id == version_id), (calibration.c.gallery_id, mapped)
        ),
        "backfills": names(select(backfill.c.id).where(backfill.c.version_id == version_id)),
        "evaluation sets": names(select(evaluation.c.name).where(evaluation.c.id.in_(measured))),
    }


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + " ..." * (len(names) > MAX_NAMED)
