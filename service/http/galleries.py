"""Galleries: create, list, show, delete."""

from __future__ import annotations

from fastapi import APIRouter, Request
from sqlalchemy.exc import IntegrityError

from index.engines.config import IndexConfig
from index.errors import InvalidArgument
from index.version import NAME
from regraft.models import GalleryIndex, GalleryInfo, GalleryList
from service.errors import GalleryExists
from service.http.request_context import CONFIRMED, RequestContext
from service.http.requests import CheckedRoute, Service
from service.replica.replica import LoadedGallery
from service.schemas import GalleryChange, GalleryIn, Name
from service.store.audit import record
from service.store.deletion import delete_gallery
from service.store.repository import gallery_named, insert_gallery, set_index

router = APIRouter(route_class=CheckedRoute, tags=["galleries"])


@router.post("/galleries", status_code=201)
def create(body: GalleryIn, request: Request, service: Service) -> GalleryInfo:
    """Create an empty gallery."""
    if not NAME.fullmatch(body.name):
        legal = "1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
        raise InvalidArgument(f"name must be {legal}", pointer="/name")
    try:
        with service.database.write() as connection:
            gallery_id = insert_gallery(connection, body.name, body.index)
            record(connection, request.state.who, "gallery_created", body.name)
    except IntegrityError:
        raise GalleryExists(f"gallery {body.name!r} exists already", pointer="/name") from None
    return describe(service.replica.get(gallery_id))


@router.get("/galleries")
def list_all(service: Service) -> GalleryList:
    """Every gallery."""
    return GalleryList(galleries=[describe(live) for live in service.replica.all()])


@router.get("/galleries/{name}")
def show(name: Name, service: Service) -> GalleryInfo:
    """One gallery."""
    return describe(service.replica.find(name))


@router.patch("/galleries/{name}")
def change(name: Name, body: GalleryChange, service: Service, context: RequestContext) -> GalleryInfo:
    """Index a gallery otherwise from now on, while it serves."""
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
    """Delete a gallery with its items, images, deployments and backfills; those of a large one are freed afterwards."""
    with service.database.write(dry_run=context.dry_run) as connection:
        gallery_id = gallery_named(connection, name).id
        if context.dry_run:
            return
        delete_gallery(connection, gallery_id)
        record(connection, context.who, "gallery_deleted", name, gallery=gallery_id)
    service.replica.forget(gallery_id)
    service.reaper.free_gallery(gallery_id)


def describe(live: LoadedGallery) -> GalleryInfo:
    """What a user sees of a gallery."""
    items_by_version = live.gallery.items_by_version()
    current = live.current and live.current.name
    return GalleryInfo(
        name=live.name,
        current=current,
        items=sum(items_by_version.values()),
        mix=items_by_version,
        seq=live.seq,
        created=live.created,
        index=_index(live.gallery.config),
        indexed=live.gallery.indexed(),
    )


def _index(config: IndexConfig) -> GalleryIndex:
    return GalleryIndex(kind=config.kind.value, storage=config.storage.value, recall=config.recall)
