"""Versions over HTTP: register a version folder, list, show, delete."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from fastapi import APIRouter, Request, Response
from sqlalchemy.exc import IntegrityError

from index.durable import sync_all
from index.incoming import incoming_folder
from index.isolated import verify_isolated
from index.version import Edge, Version
from index.version_folder.archive import unpack_version
from index.version_folder.folder import card_sha256, load_version
from regraft.models import EdgeSummary, VersionInfo, VersionList
from service.errors import DeletedMeanwhile, VersionExists
from service.http.bodies.forms import read_form
from service.http.bodies.media_types import FORM, media_type
from service.http.bodies.schemas import FILE, fields, reads
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.dependencies import CONFIRMED, RequestContext, Service
from service.registry.fetched_folders import version_key
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.registry.version_records import insert_version, registered_ids, registered_sha256
from service.runtime import Runtime
from service.schemas import Name
from service.store.audit import ChangeContext, record
from service.upgrades.removal import remove

router = APIRouter(route_class=CheckedRoute, tags=["versions"])


@router.post(
    "/versions",
    status_code=201,
    openapi_extra=reads(form=fields({"archive": FILE}, required=("archive",))),
)
async def register(request: Request, response: Response, service: Service, context: RequestContext) -> VersionInfo:
    """Register a version folder, sent as the .zip file `archive`.

    Sending the same version again changes nothing (200), or repairs its folder if it is damaged.
    """
    media_type(request, FORM)
    async with read_form(request, files="archive", fields=set(), max_files=1, max_field_bytes=1024) as form:
        archive = form.only_file("archive").file
        described, is_new = await service.run_write(register_archive, service, archive, context)
    response.status_code = context.status(201 if is_new else 200)
    return described


@router.get("/versions")
def list_all(service: Service) -> VersionList:
    """List all registered versions, in order of registration."""
    service.registry.sync()
    return VersionList(versions=[describe(service.registry, registered) for registered in service.registry.all()])


@router.get("/versions/{name}")
def show(name: Name, service: Service) -> VersionInfo:
    """Show a registered version."""
    service.registry.sync_edges()  # another process may have deleted it
    return describe(service.registry, service.registry.named(name))


@router.delete("/versions/{name}", status_code=204, dependencies=[CONFIRMED])
def delete(name: Name, service: Service, context: RequestContext) -> None:
    """Delete an unused version with the edges from it. Refused while anything depends on it."""
    remove(service.settings.versions, service.database, service.registry, name, context)


def register_archive(service: Runtime, archive: BinaryIO, context: ChangeContext) -> tuple[VersionInfo, bool]:
    """Unpack, verify and, unless it is a dry run, register a version archive.

    If the version is registered already, the archive replaces its folder if that is damaged.

    Returns:
        The public description of the version, and whether it is new.

    Raises:
        InvalidVersionFolder: the folder is invalid, or an edge leads to an unregistered version; names which.
        VersionExists: a version of this name with other content is registered.
    """
    with incoming_folder(service.settings.versions) as workspace:
        packed = workspace / "archive.zip"
        with packed.open("wb") as stream:
            shutil.copyfileobj(archive, stream, 1 << 20)
        folder = workspace / "folder"
        unpack_version(packed, folder)
        version = load_version(folder)
        service.registry.sync()
        verified_with: dict[str, int] = {}
        if _registered(service, version) is None:
            # Before the lock, since it is slow; other versions may be added or removed meanwhile.
            others = service.registry.all()
            verified_with = {other.name: other.id for other in others}
            verify_isolated(folder, {other.name: other.card for other in others}, service.settings.verifying)
        with service.registry.folders_lock:
            registered = _registered(service, version)
            if registered is None and context.dry_run:
                return _described(version, version.edges, (), None), True
            if not context.dry_run:  # before the row: its readers may be on another machine
                service.registry.folders.put(folder, version_key(card_sha256(folder)))
            if registered is None:
                _register(service, version, context, verified_with)
            elif service.registry.named(version.name).problem and not context.dry_run:
                _restore(service, version.name, folder, workspace / "damaged")
            return describe(service.registry, service.registry.named(version.name)), registered is None


def describe(registry: Registry, registered: LoadedVersion) -> VersionInfo:
    """The public description of a version."""
    edges = [edge for edge in registry.graph().edges if edge.new == registered.name]
    return _described(registered.version, edges, registered.loaded, registered.created, registered.problem)


def _described(
    version: Version, edges: Iterable[Edge], loaded: Sequence[str], created: float | None, problem: str = ""
) -> VersionInfo:
    card = version.card
    return VersionInfo(
        name=card.name,
        dim=card.dim,
        space=dict(card.space),
        method=card.method,
        metrics=dict(card.metrics),
        side_dim=card.side_dim,
        encoder=bool(card.encoder),
        text=card.text,
        loaded=list(loaded),
        edges=[
            EdgeSummary(old=e.old, kind=e.kind.value, scores={name: dict(vars(s)) for name, s in e.scores.items()})
            for e in edges
        ],
        created=created,
        problem=problem or None,
    )


def _registered(service: Runtime, version: Version) -> str | None:
    """The sha256 of the card registered by this name, None: there is none. Raises VersionExists for another card."""
    with service.database.lookup() as connection:
        sha256 = registered_sha256(connection, version.name)
    if sha256 not in {None, card_sha256(version.folder)}:
        raise VersionExists(f"version {version.name!r} is already registered with other content", pointer="/archive")
    return sha256


def _register(service: Runtime, loaded: Version, context: ChangeContext, verified_with: Mapping[str, int]) -> None:
    """Add a version; `verified_with`: names and numbers of the versions with which its edges were verified."""
    folder = loaded.folder
    sync_all([folder, *folder.rglob("*")])
    final = service.settings.versions / loaded.name
    with service.database.write() as connection:
        old_ids = registered_ids(connection, [edge.old for edge in loaded.edges])
        if any(verified_with.get(edge.old, old) != old for edge, old in zip(loaded.edges, old_ids, strict=True)):
            raise DeletedMeanwhile  # and another version got its name
        try:
            insert_version(connection, loaded, old_ids)
        except IntegrityError:  # registered by another process at the same moment
            raise VersionExists(
                f"version {loaded.name!r} was registered at the same time", pointer="/archive"
            ) from None
        record(connection, context.who, "version_registered", loaded.name, card_sha256=card_sha256(folder))
        # A version that cannot be described must not be committed: every list of versions would fail from then on.
        _described(loaded, loaded.edges, (), time.time()).model_dump_json()
        # The row is not committed yet, so a folder of this name can only remain from a crash at this point.
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
        sync_all([final.parent])


def _restore(service: Runtime, name: str, folder: Path, damaged: Path) -> None:
    """Replace a damaged version folder by the registered one. Other processes use it from their next start on."""
    sync_all([folder, *folder.rglob("*")])
    final = service.settings.versions / name
    if final.exists():
        final.rename(damaged)
    folder.rename(final)
    sync_all([final.parent])
    service.registry.recover(name)
    for loaded in service.replica.all():
        service.replica.refresh(loaded.id)
