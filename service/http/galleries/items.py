"""Items over HTTP: ingest as images, texts or embeddings, list, show, fetch the image, change metadata, delete."""

from __future__ import annotations

import io
from itertools import chain
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from PIL import Image, UnidentifiedImageError
from pydantic import Field, WithJsonSchema
from sqlalchemy import Connection, and_, false
from starlette.responses import JSONResponse

from index.errors import InvalidArgument, InvalidFilter
from index.metadata.filter import parse_filter
from index.version import Origin
from regraft.models import DeleteResult, EmbeddingInfo, IngestResult, ItemDetail, ItemInfo, ItemPage, MetadataResult
from service.errors import InvalidBody, NoImage
from service.http.bodies.forms import read_form
from service.http.bodies.schemas import EMBEDDING, FILE, FILE_NAME, fields, gives, many, reads
from service.http.bodies.strict_json import parse_any_json
from service.http.galleries.ingest import MadeBy, TableVersion, ingest_array, ingest_body, ingest_files, respond
from service.http.galleries.shown_items import MAX_PAGE, WithText, describe_item, texts_of
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.cursors import decode_cursor, encode_cursor
from service.http.requests.dependencies import CONFIRMED_IF_GIVEN, RequestContext, Service
from service.items.deletion import delete_named, delete_passing
from service.items.metadata import patch_named, patch_passing
from service.items.transaction import IngestOptions
from service.registry.placement import placement_in
from service.registry.storing import UpdateMode
from service.runtime import Runtime
from service.schemas import FILTER, ID, NAME, Body, DeletionIn, ItemId, MetadataIn, Name
from service.store.galleries.embeddings import embeddings_of
from service.store.galleries.filtering import page_of_passing
from service.store.galleries.gallery import gallery_named
from service.store.galleries.items import items_after, live_item
from service.store.image_store.keys import is_text
from service.store.rows import ItemRow
from service.store.sql.arrays import key_table
from service.store.tables import item

router = APIRouter(route_class=CheckedRoute, tags=["items"])

Replace = Annotated[bool | None, Query(description="existing items: true: replaced entirely; false: refused")]
MODES = {None: UpdateMode.UPSERT, True: UpdateMode.REPLACE, False: UpdateMode.INSERT_ONLY}
FilterText = Annotated[
    str | None, Query(alias="filter", description="metadata filter as JSON: only items that match it")
]
IMAGE = gives("image/*")
# An item whose id ends in /image is shown as JSON; an image that is damaged on disk has no media type.
IMAGE[200]["content"] |= {"application/json": {}, "application/octet-stream": {}}
METADATA = {"type": "object"}
TEXT = {"type": "string", "minLength": 1, "description": "the item's text"}
INGEST_BODY = reads(
    arrow="`id`, `embedding` (fixed-size lists of floats), and one column per metadata field",
    form=fields(
        {
            "items": many(fields({"id": ID, "metadata": METADATA, "image": FILE_NAME, "text": TEXT}, required=("id",))),
            "images": many(FILE),
            "embeddings": {
                **FILE,
                "description": "instead of images: a matrix in NumPy's format (.npy), one row per item",
            },
            "version": {**NAME, "description": "version of the embeddings; default: the gallery's current version"},
        },
        required=("items",),
    ),
    json=fields(
        {
            "version": {**NAME, "description": "version of the embeddings; default: the gallery's current version"},
            "items": many(
                {
                    "anyOf": [
                        fields(
                            {"id": ID, "metadata": METADATA, "embedding": EMBEDDING, "text": TEXT},
                            required=("id", "embedding"),
                        ),
                        fields({"id": ID, "metadata": METADATA, "text": TEXT}, required=("id", "text")),
                    ]
                }
            ),
        },
        required=("items",),
    ),
)


class ListIn(Body):
    """A page of the items whose metadata pass a filter."""

    largest = "max_json_bytes"

    filter: Annotated[dict[str, Any], WithJsonSchema(FILTER)]
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 100
    cursor: str | None = None
    with_text: bool = False


@router.post("/galleries/{name}/items", response_model=IngestResult, openapi_extra=INGEST_BODY)
async def ingest(
    name: Name,
    request: Request,
    service: Service,
    atomic: bool = False,
    replace: Replace = None,
    origin: MadeBy = "supplied",
    version: TableVersion = None,
) -> Response:
    """Store items; with `atomic`, all or none.

    The current version embeds images and texts. For an existing item, an embedding is added to those by other versions,
    an image or a text replaces the item's content and embeddings, and metadata that are not sent stay.
    """
    settings, options = service.settings, IngestOptions(atomic, MODES[replace], Origin(origin))
    if (answer := await ingest_body(request, service, name, version, options)) is not None:
        return answer
    async with read_form(
        request,
        files="images",
        array="embeddings",
        fields={"items", "version"},
        max_files=settings.max_batch,
        max_field_bytes=settings.max_json_bytes,
    ) as form:
        if form.array is None and "version" in form.fields:
            raise InvalidBody("version is only legal with embeddings", pointer="/version")
        if form.array is None and origin != "supplied":
            raise InvalidArgument("origin is only legal with embeddings, not with images", pointer="/origin")
        stored = ingest_files if form.array is None else ingest_array
        return await service.run_write(lambda: respond(stored(service, name, form, options)))


@router.get("/galleries/{name}/items")
def list_page(
    name: Name,
    service: Service,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    cursor: str = "",
    with_text: WithText = False,
    where: FilterText = None,
) -> ItemPage:
    """List items, one page at a time. With a filter a page may have fewer than `limit` items while `next` is set."""
    return _list(service, name, limit, cursor, with_text, None if where is None else _filter(where))


@router.post("/galleries/{name}/items:list")
def list_passing(name: Name, body: ListIn, service: Service) -> ItemPage:
    """List the items that match a filter, one page at a time; the filter is in the body, so it may be long."""
    parse_filter(body.filter)  # an empty gallery would not check it
    return _list(service, name, body.limit, body.cursor or "", body.with_text, body.filter)


def _list(
    service: Runtime, name: str, limit: int, cursor: str, with_text: bool, where: dict[str, Any] | None
) -> ItemPage:
    with service.database.read() as connection:
        gallery = gallery_named(connection, name)
        page, last_key = _page(connection, gallery.id, decode_cursor(gallery.id, cursor), limit, where)
        origins = embeddings_of(connection, gallery.id, [row.id for row in page])
    placement = placement_in(service.registry, gallery, set(chain.from_iterable(origins.values())))
    next_cursor = None if last_key is None else encode_cursor(gallery.id, last_key)
    texts = texts_of(service.blobs, page) if with_text else {}
    described = (describe_item(service, placement, row, origins[row.id], texts) for row in page)
    return ItemPage(items=[ItemInfo(**item_fields) for item_fields in described], next=next_cursor)


def _page(
    connection: Connection, gallery_id: int, after: int, limit: int, where: dict[str, Any] | None
) -> tuple[list[ItemRow], int | None]:
    """Rows after the key `after` that pass a filter, and the last key of the page; None: there is no next page."""
    if where is None:
        rows = items_after(connection, gallery_id, after, limit + 1)
        return rows[:limit], rows[limit - 1].id if len(rows) > limit else None
    live = and_(item.c.gallery_id == gallery_id, item.c.deleted == false())
    keys, last_key = page_of_passing(connection, live, where, after, limit)
    passing = item.c.id.in_(key_table(connection, keys).keys)
    return items_after(connection, gallery_id, after, limit, passing) if keys else [], last_key


def _filter(text: str) -> dict[str, Any]:
    """A filter from a query parameter. Raises InvalidFilter."""
    try:
        parsed = parse_any_json(text)
    except InvalidBody as error:
        raise InvalidFilter(f"the query parameter filter must be JSON: {error.message}", pointer="/filter") from error
    parse_filter(parsed)
    return dict(parsed)


@router.post("/galleries/{name}/items:delete")
def remove_many(name: Name, body: DeletionIn, service: Service, context: RequestContext) -> DeleteResult:
    """Delete items by id (unknown ids are listed), or all that match a filter."""
    if body.filter is not None and "ids" in body.model_fields_set:
        raise InvalidArgument("ids and filter cannot be used together", pointer="/filter")
    if body.filter is not None:
        return DeleteResult(deleted=delete_passing(service, name, body.filter, dry_run=context.dry_run), missing=[])
    if not body.ids:
        raise InvalidArgument("ids must have at least one id; or give a filter", pointer="/ids")
    ids = list(dict.fromkeys(body.ids))
    deleted = delete_named(service, name, ids, dry_run=context.dry_run)
    return DeleteResult(deleted=len(deleted), missing=[i for i in ids if i not in deleted])


@router.patch("/galleries/{name}/items")
def change_metadata(
    name: Name, body: MetadataIn, service: Service, context: RequestContext, atomic: bool = False
) -> MetadataResult:
    """Change the metadata of items by JSON Merge Patch; everything else stays."""
    if body.filter is None:
        if body.metadata is not None:
            raise InvalidArgument("metadata beside items requires a filter", pointer="/metadata")
        return patch_named(service, name, body.items, context, atomic=atomic)
    if "items" in body.model_fields_set:
        raise InvalidArgument("items and filter cannot be used together", pointer="/filter")
    if atomic:
        raise InvalidArgument(
            "atomic cannot be used with filter: items are changed a thousand at a time", pointer="/atomic"
        )
    if body.metadata is None:
        raise InvalidArgument("metadata is missing: the changes for the matching items", pointer="/metadata")
    return patch_passing(service, name, body.filter, body.metadata, context)


@router.get(
    "/galleries/{name}/items/{item_id:path}/image",
    response_class=Response,
    responses=IMAGE,
    dependencies=[CONFIRMED_IF_GIVEN],
)
def show_image(name: Name, item_id: ItemId, request: Request, service: Service) -> Response:
    """Get an item's image, unchanged."""
    if request.scope["raw_path"].upper().endswith(b"%2FIMAGE"):
        return JSONResponse(show(name, f"{item_id}/image", service).model_dump())  # the id itself ends in /image
    while True:
        key = _blob_of(service, name, item_id)
        image = service.blobs.fetch(key)
        if image is None:
            if _blob_of(service, name, item_id) == key:
                raise NoImage("the image of this item is missing")
            continue  # replaced between the two reads
        return Response(image, media_type=_media_type_of(image))


@router.get("/galleries/{name}/items/{item_id:path}")
def show(name: Name, item_id: ItemId, service: Service) -> ItemDetail:
    """Show an item and its embeddings."""
    with service.database.read() as connection:
        gallery = gallery_named(connection, name)
        row = live_item(connection, gallery.id, item_id)
        origins = embeddings_of(connection, gallery.id, [row.id])[row.id]
    embeddings = [EmbeddingInfo(version=service.registry.by_id(v).name, origin=origin) for v, origin in origins.items()]
    texts = texts_of(service.blobs, [row])
    described = describe_item(service, placement_in(service.registry, gallery, origins), row, origins, texts)
    return ItemDetail(**described, embeddings=embeddings)


@router.delete("/galleries/{name}/items/{item_id:path}", status_code=204, dependencies=[CONFIRMED_IF_GIVEN])
def remove(name: Name, item_id: ItemId, service: Service) -> None:
    """Delete an item."""
    if not delete_named(service, name, [item_id]):
        with service.database.read() as connection:
            live_item(connection, gallery_named(connection, name).id, item_id)


def _blob_of(service: Runtime, name: str, item_id: str) -> str:
    with service.database.read() as connection:
        row = live_item(connection, gallery_named(connection, name).id, item_id)
    if row.blob is None or is_text(row.blob):
        what = "as an embedding" if row.blob is None else "as a text"
        raise NoImage(f"item {item_id!r} was stored {what}, without an image")
    return row.blob


def _media_type_of(image: bytes) -> str:
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return Image.MIME[opened.format or ""]
    except UnidentifiedImageError:  # damaged since it was stored
        return "application/octet-stream"
