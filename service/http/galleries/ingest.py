"""The bodies of an ingest, read here and stored by `service.items`; an entry point for each kind of body.

`ingest_body` finds out which kind it is. Forms are parsed by the routes, each of which takes other files.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import Query, Request, Response
from numpy.typing import NDArray

from index.errors import InvalidArgument
from index.version import Origin
from service.errors import InvalidBody, InvalidItem, UnknownParameter
from service.http.bodies.arrow import ARROW, read_items
from service.http.bodies.forms import NO_SUCH_FILE, Form
from service.http.bodies.media_types import FORM, JSON, media_type
from service.http.bodies.npy import read_npy
from service.http.bodies.strict_json import parse_any_json
from service.http.requests.checked_route import read_body
from service.items.batch import IngestBatch, read_batch
from service.items.embeddings import ingest_embeddings
from service.items.images import ingest_images
from service.items.texts import are_texts, ingest_texts
from service.items.transaction import Destination, Ingested, IngestOptions, while_current_holds
from service.registry.embedding import errors_at
from service.registry.storing import UpdateMode
from service.runtime import Runtime
from service.schemas import take_object

MadeBy = Annotated[
    Literal["supplied", "transformed"],
    Query(description="origin of embeddings; `transformed`: made by a forward edge, in another gallery"),
]
TableVersion = Annotated[str | None, Query(description="version of the embeddings of a table in Arrow's format")]


async def ingest_body(
    request: Request, service: Runtime, name: str, version: str | None, options: IngestOptions
) -> Response | None:
    """Store the embeddings of a body in JSON or a table in Arrow's format; None: it is a form."""
    kind = media_type(request, JSON, FORM, ARROW)
    if version is not None and kind != ARROW:
        raise UnknownParameter("version must be in the body, except for a table in Arrow's format", pointer="/version")
    if kind == FORM:
        return None
    raw = await read_body(
        request, service.settings.max_body_bytes if kind == ARROW else service.settings.max_json_bytes
    )
    if kind == ARROW:
        stored = partial(ingest_table, service, name, raw, version, options)
    else:
        stored = partial(ingest_json, service, name, raw, options)
    return await service.run_write(lambda: respond(stored()))


def respond(ingested: Ingested) -> Response:
    """The response to an ingest, in ASCII, since ids of invalid items are repeated; encoded on the calling thread."""
    return Response(json.dumps(ingested.as_json()), media_type=JSON)


def ingest_files(service: Runtime, name: str, form: Form, options: IngestOptions) -> Ingested:
    """Store the images and texts of a form, embedded by the gallery's current version.

    Raises:
        UnknownGallery: there is no such gallery.
        NoCurrentVersion: nothing is deployed yet.
        NoEncoder, NoTextEntrance: the current version does not embed images, or texts.
        InvalidBody: the form is invalid.
        ItemsRefused: no item is valid, or the batch is atomic and one is invalid.
    """

    def attempt(to: Destination) -> Ingested:
        batch = read_batch(_listed(form), "image", service.settings, "text", either=True)
        return ingest_images(to, batch, _files(form, batch))

    return while_current_holds(service, name, options, attempt)


def ingest_json(service: Runtime, name: str, raw: bytes, options: IngestOptions) -> Ingested:
    """Store items in JSON: texts, or embeddings made elsewhere, by the named version, by default the current one.

    Raises:
        UnknownGallery, UnknownVersion: there is no such gallery or version.
        NoCurrentVersion: nothing is deployed yet.
        InvalidBody: the JSON is invalid.
        ItemsRefused: no item is valid, or the batch is atomic and one is invalid.
    """

    def attempt(to: Destination) -> Ingested:
        body = take_object(parse_any_json(raw), {"version", "items"}, "")
        if options.mode is not UpdateMode.UPDATE_ONLY and are_texts(body.get("items")):
            if options.origin is not Origin.SUPPLIED:
                raise InvalidArgument("origin is only legal with embeddings, not with texts", pointer="/origin")
            return ingest_texts(to, body)
        return ingest_embeddings(to, body)

    return while_current_holds(service, name, options, attempt)


def ingest_array(service: Runtime, name: str, form: Form, options: IngestOptions) -> Ingested:
    """Store the items of a form whose embeddings are the rows of an array. Raises as `ingest_json`."""
    assert form.array is not None
    form.array.file.seek(0)
    rows, listed = read_npy(form.array.file.read(), "/embeddings"), _listed(form)
    return _ingest_rows(service, name, form.fields.get("version"), listed, rows, "/embeddings", options)


def ingest_table(service: Runtime, name: str, raw: bytes, version: str | None, options: IngestOptions) -> Ingested:
    """Store the items of a table in Arrow's format, with their embeddings. Raises as `ingest_json`."""
    listed, rows = read_items(raw, service.settings.max_batch)
    return _ingest_rows(service, name, version, listed, rows, "/embedding", options)


def _ingest_rows(
    service: Runtime,
    name: str,
    version: str | None,
    listed: object,
    rows: NDArray[Any],
    pointer: str,
    options: IngestOptions,
) -> Ingested:
    """Store items, `listed` as in JSON but without embeddings, with the embeddings `rows` (N, D)."""

    def attempt(to: Destination) -> Ingested:
        body = {"items": listed} if version is None else {"items": listed, "version": version}
        return ingest_embeddings(to, body, rows, pointer)

    return while_current_holds(service, name, options, attempt)


def _listed(form: Form) -> Any:
    if "items" not in form.fields:
        raise InvalidBody("the form must have the field 'items', a JSON list", pointer="/items")
    with errors_at("/items"):
        return parse_any_json(form.fields["items"])


def _files(form: Form, batch: IngestBatch) -> dict[str, BinaryIO]:
    """The files by name; an item whose image is not the name of a file becomes an error."""
    files = {name: file.file for name, file in form.files_by_name().items()}
    drafts, batch.drafts = batch.drafts, []
    for draft in drafts:
        if draft.text is None and not (isinstance(draft.content, str) and draft.content in files):
            batch.refuse(draft.index, draft.id, InvalidItem(NO_SUCH_FILE, pointer="/image"))
        else:
            batch.drafts.append(draft)
    return files
