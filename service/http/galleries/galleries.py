"""Galleries over HTTP: create, list, show, change the index, delete."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from index.engines.config import IndexConfig
from regraft.models import CollectionInfo, GalleryIndex, GalleryInfo, GalleryList, LoadingGallery
from service.errors import GalleryExists
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.dependencies import CONFIRMED, LOADED, RequestContext, Service
from service.registry.placement import preference
from service.replica.load_progress import LoadProgress
from service.replica.loaded import LoadedGallery
from service.runtime import Runtime
from service.schemas import GalleryChange, GalleryIn, Name, check_name
from service.store.api_keys import ApiKeyRow
from service.store.audit import record
from service.store.galleries.deletion import delete_gallery
from service.store.galleries.gallery import (
    all_galleries,
    gallery_named,
    gallery_states,
    index_of,
    insert_gallery,
    set_index,
)
from service.store.rows import GalleryRow

router = APIRouter(route_class=CheckedRoute, tags=["galleries"])


@router.post("/galleries", status_code=201)
def create(body: GalleryIn, request: Request, service: Service) -> GalleryInfo:
    """Create an empty gallery."""
    check_name(body.name)
    service.engines.check(body.index.kind)
    try:
        with service.database.write() as connection:
            gallery_id = insert_gallery(connection, body.name, body.index)
            record(connection, request.state.who, "gallery_created", body.name)
    except IntegrityError:
        raise GalleryExists(f"gallery {body.name!r} already exists", pointer="/name") from None
    return describe(service.replica.get(gallery_id))


@router.get("/galleries")
def list_all(request: Request, service: Service) -> GalleryList:
    """List the galleries that the key permits."""
    key: ApiKeyRow | None = request.state.key
    _catch_up(service)
    with service.database.read() as connection:
        rows = [row for row in all_galleries(connection) if key is None or key.opens(row.name)]
        return GalleryList(galleries=[_listed(service, connection, row) for row in rows])


async def _load_unless_loading(name: Name, service: Service) -> None:
    if service.replica.progress(name) is None:
        await service.ensure_loaded(name)


@router.get("/galleries/{name}", dependencies=[Depends(_load_unless_loading)])
def show(name: Name, service: Service) -> GalleryInfo:
    """Show a gallery; while it is loading, as the database has it, with the progress."""
    if service.replica.progress(name) is None:
        return describe(service.replica.find(name))
    with service.database.read() as connection:
        return _listed(service, connection, gallery_named(connection, name))


@router.patch("/galleries/{name}", dependencies=[LOADED])
def change(name: Name, body: GalleryChange, service: Service, context: RequestContext) -> GalleryInfo:
    """Change a gallery's index while it serves."""
    service.engines.check(body.index.kind)
    with service.database.write(dry_run=context.dry_run) as connection:
        gallery_id = gallery_named(connection, name).id
        if context.dry_run:
            return describe(service.replica.get(gallery_id)).model_copy(update={"index": _index(body.index)})
        set_index(connection, gallery_id, body.index)
        chosen = body.index.model_dump(mode="json")
        record(connection, context.who, "gallery_changed", name, gallery=gallery_id, index=chosen)
    service.replica.refresh(gallery_id)
    return describe(service.replica.get(gallery_id))


@router.delete("/galleries/{name}", status_code=204, dependencies=[CONFIRMED])
def remove(name: Name, service: Service, context: RequestContext) -> None:
    """Delete a gallery with its items, images, deployments and backfills; large ones are freed in the background."""
    with service.database.write(dry_run=context.dry_run) as connection:
        gallery_id = gallery_named(connection, name).id
        if context.dry_run:
            return
        delete_gallery(connection, gallery_id)
        record(connection, context.who, "gallery_deleted", name, gallery=gallery_id)
    service.replica.forget(gallery_id)
    service.reaper.free_gallery(gallery_id)


def _catch_up(service: Runtime) -> None:
    """Refresh loaded galleries up to what other processes have acknowledged, as queries do."""
    galleries = {loaded.id: loaded for loaded in service.replica.all()}
    with service.database.lookup() as connection:
        now = gallery_states(connection, list(galleries))
    for gallery_id, (next_seq, _) in now.items():
        if galleries[gallery_id].seq < next_seq - 1:
            service.replica.refresh(gallery_id)


def _listed(service: Runtime, connection: Connection, row: GalleryRow) -> GalleryInfo:
    """Describe a gallery from memory, or from the database if it is not loaded, so that a list loads nothing."""
    if (loaded := service.replica.cache.peek(row.id)) is not None:
        return describe(loaded)
    registry = service.registry
    current = None if row.current_id is None else registry.by_id(row.current_id)
    order = [version.id for version in preference(registry, current)]
    mix = service.item_count_cache.of(connection, row, order)
    return GalleryInfo(
        name=row.name,
        current=current and current.name,
        items=sum(mix.values()),
        mix={registry.by_id(number).name: items for number, items in mix.items()},
        seq=row.next_seq - 1,
        created=row.created,
        index=_index(index_of(row)),
        indexed=0,
        loaded=False,
        bytes=0,
        collections=[],
        loading=(progress := service.replica.progress(row.name)) and describe_load(progress),
    )


def describe(loaded: LoadedGallery) -> GalleryInfo:
    """The public description of a gallery."""
    items_by_version = loaded.gallery.items_by_version()
    current = loaded.current and loaded.current.name
    return GalleryInfo(
        name=loaded.name,
        current=current,
        items=sum(items_by_version.values()),
        mix=items_by_version,
        seq=loaded.seq,
        created=loaded.created,
        index=_index(loaded.gallery.config),
        indexed=loaded.gallery.indexed_count(),
        loaded=True,
        bytes=loaded.bytes,
        loading=None,
        collections=[
            CollectionInfo(
                version=version, origin=origin, lag=max(0, loaded.seq - shard.covered_seq), here=shard.local_row_count()
            )
            for (version, origin), shard in loaded.gallery.remote.shards().items()
        ],
    )


def describe_load(progress: LoadProgress) -> LoadingGallery:
    """The public description of a load."""
    return LoadingGallery(gallery=progress.gallery, done=progress.done, total=progress.total)


def _index(config: IndexConfig) -> GalleryIndex:
    return GalleryIndex(kind=config.kind.value, storage=config.storage.value, recall=config.recall)
