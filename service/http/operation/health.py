"""Health: whether the process is alive, whether it is ready, and what is damaged or unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress

from fastapi import APIRouter
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from index.errors import RegraftError
from regraft.models import Health, Readiness
from service.errors import DatabaseDamaged
from service.http.galleries.galleries import describe_load
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.dependencies import Service
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import route_to
from service.registry.registry import Registry
from service.runtime import Runtime
from service.store.faults import sqlite_file, unwritable

router = APIRouter(route_class=CheckedRoute, tags=["health"])

VERSION = "0.2.0"


class NotReady(RegraftError):
    """The service does not follow its database, or is loading galleries into memory."""

    status = 503
    code = "not_ready"


class Draining(RegraftError):
    """The service is stopping and answers requests only briefly: send them to another process."""

    status = 503
    code = "draining"


@router.get("/health")
async def health() -> Health:
    """Check that the process answers."""
    return Health(status="ok", version=VERSION)


@router.get("/health/ready")
async def ready(service: Service) -> Readiness:
    """Check readiness: the database answers, the replica follows it and has preloaded its galleries.

    Degraded counts as ready: everything undamaged is served.
    """
    # Not on the threads of requests, which may all wait for a slow image store while small queries are answered.
    return await asyncio.to_thread(_readiness, service)


def _readiness(service: Runtime) -> Readiness:
    if service.stopping.is_set():
        raise Draining
    with service.database.lookup() as connection:
        connection.execute(text("select 1"))
    if service.database.damaged:
        raise DatabaseDamaged
    if service.replica.failure is not None:
        raise NotReady(f"the replica cannot follow the change feed ({service.replica.failure})")
    if (name := service.preload.loading) is not None:
        progress = service.replica.progress(name)
        how_far = f": {progress.done} of {progress.total} items are in memory" if progress is not None else ""
        raise NotReady(f"gallery {name} is loading{how_far}")
    found = list(problems(service))
    status, cache = "degraded" if found else "ready", service.replica.cache
    return Readiness(
        status=status,
        problems=found,
        galleries_loaded=cache.loaded(),
        galleries_bytes=cache.bytes(),
        loading=[describe_load(progress) for progress in service.replica.loading()],
    )


def problems(service: Runtime) -> Iterator[str]:
    """A sentence for each thing that is damaged or unreachable and therefore not used."""
    for registered in service.registry.all():
        if registered.problem:
            yield f"version {registered.name} is quarantined: {registered.problem}"
    for declared in service.registry.edges():
        if declared.problem:
            new, old, kind = declared.edge.key
            yield f"the {kind} edge from {new} to {old} is not used: {declared.problem}"
    for loaded in service.replica.all():
        if missing := loaded.gallery.missing():
            yield f"gallery {loaded.name}: {missing} items are left out because their embeddings are missing or damaged"
        if loaded.current is not None:
            yield from _out_of_reach(service.registry, loaded.name, loaded.current, loaded.gallery.items_by_version())
    with suppress(SQLAlchemyError):  # readiness and metrics report a database that is away by themselves
        yield from service.engine_writer.problems()
    yield from _disk_problems(service)


def _disk_problems(service: Runtime) -> Iterator[str]:
    if service.blobs.problem:
        yield service.blobs.problem
    if full := service.space.problem():
        yield full
    settings = service.settings
    places = (settings.data, settings.versions, sqlite_file(settings.database_url))
    for place in unwritable(place for place in places if place):
        yield f"the service has no permission to write to {place}"


def _out_of_reach(
    registry: Registry, gallery: str, current: LoadedVersion, items_by_version: Mapping[str, int]
) -> Iterator[str]:
    for version, items in items_by_version.items():
        if route_to(registry, current, registry.named(version)) is None:
            encoders = registry.encoders() if current.card.encoder else frozenset[str]()
            why = registry.graph().unreachable(current.name, version, encoders)
            yield f"gallery {gallery}: {items} items of {version} are unreachable: {why}"
