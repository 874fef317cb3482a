"""Embeddings of existing items: add them by a version, read them page by page, list items without one."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from index.errors import InvalidArgument
from index.item_id import is_writable
from index.space import Vectors
from index.version import Origin
from regraft.models import EmbeddingPage, IngestResult, MissingPage
from service.errors import InvalidBody
from service.http.bodies.arrow import ARROW, EMBEDDING, accepts_arrow, write_items
from service.http.bodies.forms import Form, read_form
from service.http.bodies.media_types import JSON
from service.http.bodies.schemas import EMBEDDING as NUMBERS
from service.http.bodies.schemas import FILE, fields, gives, many, reads
from service.http.bodies.strict_json import parse_any_json
from service.http.galleries.ingest import MadeBy, TableVersion, ingest_array, ingest_body, respond
from service.http.galleries.shown_items import MAX_PAGE, WithText, describe_item, texts_of
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.cursors import decode_cursor, encode_cursor
from service.http.requests.dependencies import Service
from service.items.transaction import IngestOptions
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import placement_in
from service.registry.storing import UpdateMode
from service.schemas import ID, NAME, Name
from service.store.galleries.embeddings import has_own_embedding, vectors_of
from service.store.galleries.gallery import gallery_named
from service.store.galleries.held_versions import versions_with_embeddings
from service.store.galleries.items import items_after
from service.store.sql.arrays import to_json
from service.store.tables import item
from service.store.vectors.codec import from_bytes, is_usable

router = APIRouter(route_class=CheckedRoute, tags=["items"])

VERSION = {**NAME, "description": "version of the embeddings; default: the gallery's current version"}
NAMED = {"id": ID}
BODY = reads(
    arrow="`id` and `embedding` (fixed-size lists of floats)",
    form=fields(
        {
            "items": many(fields(NAMED, required=("id",))),
            "embeddings": {**FILE, "description": "a matrix in NumPy's format (.npy), one row per item"},
            "version": VERSION,
        },
        required=("items", "embeddings"),
    ),
    json=fields(
        {
            "version": VERSION,
            "items": many(fields({**NAMED, "embedding": NUMBERS}, required=("id", "embedding"))),
        },
        required=("items",),
    ),
)


@router.put("/galleries/{name}/items:embeddings", response_model=IngestResult, openapi_extra=BODY)
async def put(
    name: Name,
    request: Request,
    service: Service,
    atomic: bool = False,
    origin: MadeBy = "supplied",
    version: TableVersion = None,
) -> Response:
    """Add a version's embeddings to existing items; unknown ids are listed, with `atomic` they refuse the request.

    An embedding replaces the one by the same version; embeddings by other versions and metadata stay.
    """
    options = IngestOptions(atomic, UpdateMode.UPDATE_ONLY, Origin(origin))
    if (answer := await ingest_body(request, service, name, version, options)) is not None:
        return answer
    async with read_form(
        request,
        files="embeddings",
        fields={"items", "version"},
        max_files=1,
        max_field_bytes=service.settings.max_json_bytes,
    ) as form:
        array = Form(form.fields, (), form.only_file("embeddings", ".npy"))
        return await service.run_write(lambda: respond(ingest_array(service, name, array, options)))


@router.get("/galleries/{name}/items:embeddings", response_model=EmbeddingPage, responses=gives(ARROW))
def read(
    name: Name,
    request: Request,
    service: Service,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    cursor: str = "",
    versions: Annotated[str, Query(description="version names, separated by commas; default: all")] = "",
    with_text: WithText = False,
    ids: Annotated[str, Query(description="a JSON list of ids: only these items")] = "",
) -> Response:
    """List items with their vectors, one page at a time, as JSON or as a table in Arrow's format."""
    conditions = [item.c.external_id.in_(_parse_ids(ids))] if ids else []
    named = [service.registry.named(one) for one in versions.split(",") if one]
    with service.database.read() as connection:
        gallery = gallery_named(connection, name)
        rows = items_after(connection, gallery.id, decode_cursor(gallery.id, cursor), limit + 1, *conditions)
        page = rows[:limit]
        held_ids = [] if named else sorted(versions_with_embeddings(connection, gallery.id))
        stored = vectors_of(connection, gallery.id, [row.id for row in page])
    requested = {one.id: one for one in named or map(service.registry.by_id, held_ids)}
    placement = placement_in(service.registry, gallery, set(chain.from_iterable(stored.values())))
    texts = texts_of(service.blobs, page) if with_text else {}
    items, damaged = [], []
    for row in page:
        embeddings = _embeddings(stored[row.id], requested)
        damaged += [{"id": row.external_id, "version": one["version"]} for one in embeddings if one[EMBEDDING] is None]
        described = describe_item(service, placement, row, _origins(stored[row.id]), texts)
        items.append({**described, "embeddings": [one for one in embeddings if one[EMBEDDING] is not None]})
    next_cursor = encode_cursor(gallery.id, page[-1].id) if len(rows) > limit else None
    if accepts_arrow(request.headers.get("accept", "")):
        table = write_items(items, {one.name: one.card.dim for one in requested.values()}, next_cursor, damaged)
        return Response(table, media_type=ARROW)
    for one in (one for shown in items for one in shown["embeddings"]):
        one[EMBEDDING] = one[EMBEDDING].tolist()
    return Response(to_json({"items": items, "next": next_cursor, "damaged": damaged}), media_type=JSON)


def _origins(stored: dict[int, tuple[str, bytes]]) -> dict[int, str]:
    return {version_id: origin for version_id, (origin, _) in stored.items()}


def _parse_ids(ids: str) -> list[str]:
    try:
        parsed = parse_any_json(ids)
    except InvalidBody:
        parsed = None
    if not isinstance(parsed, list) or not all(isinstance(value, str) for value in parsed):
        raise InvalidArgument('ids must be a JSON list of ids, such as ["a", "b"]', pointer="/ids")
    return [value for value in parsed if is_writable(value)]  # other ids cannot be stored


def _embeddings(stored: dict[int, tuple[str, bytes]], versions: dict[int, LoadedVersion]) -> list[dict[str, Any]]:
    """An item's embeddings by these versions; each vector is an array (D,), or None if it is damaged."""
    return [
        {"version": version.name, "origin": stored[key][0], EMBEDDING: _vector(stored[key][1], version.card.dim)}
        for key, version in versions.items()
        if key in stored
    ]


def _vector(stored: bytes, dim: int) -> Vectors | None:
    return from_bytes([stored], dim)[0] if is_usable(stored, dim) else None


@router.get("/galleries/{name}/items:missing")
def missing(
    name: Name,
    service: Service,
    version: str,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    cursor: str = "",
) -> MissingPage:
    """List the ids of items without an embedding by a version; transformed embeddings do not count."""
    with service.database.read() as connection:
        gallery = gallery_named(connection, name)
        by = service.registry.named(version)
        rows = items_after(
            connection, gallery.id, decode_cursor(gallery.id, cursor), limit + 1, ~has_own_embedding(by.id)
        )
    page = rows[:limit]
    next_cursor = encode_cursor(gallery.id, page[-1].id) if len(rows) > limit else None
    return MissingPage(version=by.name, ids=[row.external_id for row in page], next=next_cursor)
