"""Evaluation sets: images, texts or embeddings that a user uploads once, for gates and curves to measure on.

Each entry has a label, or names the items of the gallery that are relevant to it. A set belongs to a gallery, but its
entries are not items. A set is stored completely or, if an entry is invalid, not at all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import Connection, delete, insert, select

from index.errors import RegraftError
from index.item_id import is_item_id
from index.space import Vectors, space_from_json
from regraft.models import EvaluationInfo, EvaluationList
from service.errors import BodyTooLarge, InvalidBody
from service.http.bodies.forms import NO_SUCH_FILE, Form, read_form
from service.http.bodies.media_types import FORM, JSON, media_type
from service.http.bodies.schemas import EMBEDDING, FILE, FILE_NAME, fields, many, reads
from service.http.bodies.strict_json import parse_json
from service.http.requests.checked_route import CheckedRoute, read_body
from service.http.requests.dependencies import CONFIRMED, RequestContext, Service
from service.items.stored_json import storage_problem
from service.items.texts import read_text
from service.items.transaction import write_contents
from service.registry.embedding import errors_at
from service.runtime import Runtime
from service.schemas import ID, Name, Number, check_embeddings, take_object
from service.settings import Settings
from service.store.audit import ChangeContext, record
from service.store.galleries.gallery import gallery_named, take_seq
from service.store.image_store.keys import TEXT as TEXT_KEY
from service.store.rows import EvaluationRow, one_of
from service.store.tables import evaluation, evaluation_embedding, evaluation_entry
from service.store.vectors.codec import to_bytes
from service.upgrades.gates.samples import evaluation_row, evaluation_rows

router = APIRouter(route_class=CheckedRoute, tags=["evaluations"])

MAX_NAME = 128
MAX_RELEVANT = 1_000
"""Most relevant items of an entry."""

LABEL: dict[str, Any] = {"description": "any JSON value; entries with equal labels belong together"}
RELEVANT = {**many(ID), "maxItems": MAX_RELEVANT, "description": "ids of the relevant items of the gallery"}
ENTRY = {"label": LABEL, "metadata": {"type": "object"}, "relevant": RELEVANT}
TEXT = {"type": "string", "minLength": 1, "description": "the text of the entry, if the set has no embeddings"}
SET_NAME = {
    "type": "string",
    "maxLength": MAX_NAME,
    "pattern": r"^[^\x00-\x1f\x7f-\x9f]*$",
    "description": "printable characters",
}
EVALUATION_BODY = reads(
    form=fields(
        {
            "name": SET_NAME,
            "entries": many(fields({**ENTRY, "image": FILE_NAME}, required=("image",)), least=2),
            "images": many(FILE),
        },
        required=("entries", "images"),
    ),
    json=fields(
        {
            "name": SET_NAME,
            "entries": many(fields({**ENTRY, "text": TEXT}), least=2),
            "embeddings": {
                "type": "object",
                "description": "version name -> one embedding for each entry",
                "minProperties": 1,
                "additionalProperties": many(EMBEDDING, least=2),
            },
        },
        required=("entries",),
    ),
)


@dataclass(frozen=True)
class EvaluationDraft:
    """A checked evaluation set: its kind and entries, with their images or texts (`contents`), or embeddings."""

    name: str
    kind: str
    entries: Sequence[Mapping[str, Any]]
    contents: Sequence[bytes] = ()
    embeddings: Mapping[str, Vectors] = field(default_factory=dict)


@router.post(
    "/galleries/{name}/evaluations", status_code=201, response_model=EvaluationInfo, openapi_extra=EVALUATION_BODY
)
async def create(
    name: Name, request: Request, response: Response, service: Service, context: RequestContext
) -> EvaluationInfo:
    """Add an evaluation set: images, texts, or embeddings by each compared version, with labels or relevant ids."""
    settings = service.settings
    response.status_code = context.status(201)
    if media_type(request, JSON, FORM) == JSON:
        raw = await read_body(request, settings.max_json_bytes)
        return await service.run_write(lambda: _store(service, name, by_json(service, raw), context))
    async with read_form(
        request,
        files="images",
        fields={"name", "entries"},
        max_files=settings.max_batch,
        max_field_bytes=settings.max_json_bytes,
    ) as form:
        return await service.run_write(lambda: _store(service, name, by_images(service, form), context))


@router.get("/galleries/{name}/evaluations")
def list_all(name: Name, service: Service) -> EvaluationList:
    """List a gallery's evaluation sets, oldest first."""
    with service.database.read() as connection:
        rows = evaluation_rows(connection, gallery_named(connection, name).id)
        return EvaluationList(evaluations=[_describe(service, connection, row) for row in rows])


@router.get("/galleries/{name}/evaluations/{number}")
def show(name: Name, number: Number, service: Service) -> EvaluationInfo:
    """Show an evaluation set."""
    with service.database.read() as connection:
        row = evaluation_row(connection, gallery_named(connection, name).id, number)
        return _describe(service, connection, row)


@router.delete(
    "/galleries/{name}/evaluations/{number}",
    status_code=204,
    dependencies=[CONFIRMED],
    response_class=Response,
    responses={200: {"description": "a dry run: what would be deleted", "model": EvaluationInfo}},
)
def remove(name: Name, number: Number, service: Service, context: RequestContext) -> Response:
    """Delete an evaluation set; gate reports measured on it stay."""
    with service.database.write(dry_run=context.dry_run) as connection:
        gallery_id = gallery_named(connection, name).id
        row = evaluation_row(connection, gallery_id, number)
        described = _describe(service, connection, row)
        of_set = evaluation_entry.c.evaluation_id == row.id
        blobs = list(connection.execute(select(evaluation_entry.c.blob).where(of_set)).scalars())
        connection.execute(delete(evaluation_entry).where(of_set))
        connection.execute(delete(evaluation_embedding).where(evaluation_embedding.c.evaluation_id == row.id))
        connection.execute(delete(evaluation).where(evaluation.c.id == row.id))
        record(connection, context.who, "evaluation_deleted", f"{name}/{number}", size=row.size)
    if context.dry_run:
        return JSONResponse(described.model_dump())
    service.blobs.remove(blob for blob in blobs if blob is not None)
    return Response(status_code=204)


def by_images(service: Runtime, form: Form) -> EvaluationDraft:
    """Read a set of images from a form. Raises InvalidBody, BodyTooLarge or InvalidImage, naming the entry."""
    if "entries" not in form.fields:
        raise InvalidBody("the form must have the field 'entries', a JSON list", pointer="/entries")
    entries = _entries(parse_json(form.fields["entries"], "/entries"), {*ENTRY, "image"}, service.settings)
    files, images = form.files_by_name(), []
    for number, entry in enumerate(entries):
        if not isinstance(entry.get("image"), str) or entry["image"] not in files:
            raise InvalidBody(NO_SUCH_FILE, pointer=f"/entries/{number}/image")
        file = files[entry["image"]].file
        file.seek(0)
        images.append(file.read())
        with errors_at(f"/entries/{number}/image"), service.decoder.decoded(images[-1]):
            pass
    return EvaluationDraft(_name(form.fields.get("name", "")), "images", entries, images)


def by_json(service: Runtime, raw: bytes) -> EvaluationDraft:
    """Read a set of embeddings or texts. Raises InvalidBody, BodyTooLarge, InvalidVector, InvalidText."""
    body = take_object(parse_json(raw), {"name", "entries", "embeddings"}, "")
    entries, texts = _entries(body.get("entries"), {*ENTRY, "text"}, service.settings), []
    if "embeddings" in body or not any("text" in entry for entry in entries):
        return _by_embeddings(service, body, entries)
    for number, entry in enumerate(entries):
        if "text" not in entry:
            why = "the body has no embeddings, so each entry must have a text"
            raise InvalidBody(why, pointer=f"/entries/{number}/text")
        try:
            texts.append(read_text(entry["text"], service.settings.max_text_bytes))
        except RegraftError as error:
            error.pointer = f"/entries/{number}/text"
            raise
    return EvaluationDraft(_name(body.get("name", "")), "texts", entries, texts)


def _by_embeddings(service: Runtime, body: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> EvaluationDraft:
    for number, entry in enumerate(entries):
        take_object(entry, set(ENTRY), f"/entries/{number}")
    by_version = body.get("embeddings")
    if not isinstance(by_version, dict) or not by_version:
        raise InvalidBody("embeddings must be an object: version -> embeddings", pointer="/embeddings")
    embeddings = {}
    for version, rows in by_version.items():
        with errors_at("/embeddings"):
            card = service.registry.named(version).card
        if not isinstance(rows, list) or len(rows) != len(entries):
            why = f"must have one embedding for each of the {len(entries)} entries"
            raise InvalidBody(why, pointer=f"/embeddings/{version}")
        pointer = f"/embeddings/{version}"
        embeddings[version] = check_embeddings(rows, card.dim, space_from_json(card.space), pointer, version)
    return EvaluationDraft(_name(body.get("name", "")), "embeddings", entries, embeddings=embeddings)


def _entries(entries: object, legal: set[str], settings: Settings) -> list[dict[str, Any]]:
    limit = settings.max_batch
    if not isinstance(entries, list) or len(entries) < 2:
        raise InvalidBody("entries must be a JSON list of at least two entries", pointer="/entries")
    if len(entries) > limit:
        raise BodyTooLarge(f"entries has {len(entries)} entries; at most {limit} are legal", pointer="/entries")
    for number, entry in enumerate(entries):
        take_object(entry, legal, f"/entries/{number}")
        if not isinstance(entry.get("metadata", {}), dict):
            raise InvalidBody("metadata must be a JSON object", pointer=f"/entries/{number}/metadata")
        for field_name in ("label", "metadata"):
            if why := storage_problem(entry.get(field_name), settings.max_metadata_bytes):
                raise InvalidBody(f"{field_name} {why}", pointer=f"/entries/{number}/{field_name}")
        _check_relevant(entry, number, expected="relevant" in entries[0])
    return entries


def _check_relevant(entry: Mapping[str, Any], number: int, *, expected: bool) -> None:
    """Raise InvalidBody unless the entry has valid relevant items, or, with `expected` false, none."""
    relevant, pointer = entry.get("relevant"), f"/entries/{number}/relevant"
    if ("relevant" in entry) is not expected:
        raise InvalidBody("either all entries must have relevant items, or none", pointer=pointer)
    if not expected:
        return
    if not isinstance(relevant, list) or not 1 <= len(relevant) <= MAX_RELEVANT or not all(map(is_item_id, relevant)):
        raise InvalidBody(f"relevant must be a list of 1 to {MAX_RELEVANT} ids of items", pointer=pointer)
    if entry.get("label") is not None:
        raise InvalidBody(
            "an entry must have either a label or relevant items, not both", pointer=f"/entries/{number}/label"
        )


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME or not (value.isprintable() or not value):
        raise InvalidBody(f"name must be up to {MAX_NAME} printable characters", pointer="/name")
    return value


def _store(service: Runtime, name: str, draft: EvaluationDraft, context: ChangeContext) -> EvaluationInfo:
    with service.database.lookup() as connection:
        gallery_id = gallery_named(connection, name).id
    kinds = repeat(TEXT_KEY if draft.kind == "texts" else "")
    keys = [] if context.dry_run else write_contents(service, gallery_id, draft.contents, kinds)
    try:
        with service.database.write(dry_run=context.dry_run) as connection:
            take_seq(connection, gallery_id, 0)
            row = _insert(connection, service, gallery_id, draft, keys)
            record(connection, context.who, "evaluation_added", f"{name}/{row.id}", size=row.size)
            described = _describe(service, connection, row)
    except RegraftError:
        # After any other error the set may have been committed; otherwise the files are orphans.
        service.blobs.remove(keys)
        raise
    return described.model_copy(update={"id": None}) if context.dry_run else described


def _insert(
    connection: Connection, service: Runtime, gallery_id: int, draft: EvaluationDraft, keys: Sequence[str]
) -> EvaluationRow:
    values = {
        "gallery_id": gallery_id,
        "name": draft.name,
        "kind": draft.kind,
        "size": len(draft.entries),
        "labelled": sum(entry.get("label") is not None for entry in draft.entries),
        "relevant": sum("relevant" in entry for entry in draft.entries),
        "created": time.time(),
    }
    row = one_of(EvaluationRow, connection.execute(insert(evaluation).values(values).returning(evaluation)))
    entries = [
        {
            "evaluation_id": row.id,
            "number": number,
            "label": entry.get("label"),
            "metadata": entry.get("metadata", {}),
            "blob": keys[number] if keys else None,
            "relevant": entry.get("relevant"),
        }
        for number, entry in enumerate(draft.entries)
    ]
    connection.execute(insert(evaluation_entry), entries)
    embeddings = [
        {"evaluation_id": row.id, "version_id": service.registry.named(version).id, "vectors": to_bytes(vectors)}
        for version, vectors in draft.embeddings.items()
    ]
    if embeddings:
        connection.execute(insert(evaluation_embedding), embeddings)
    return row


def _describe(service: Runtime, connection: Connection, row: EvaluationRow) -> EvaluationInfo:
    statement = select(evaluation_embedding.c.version_id).where(evaluation_embedding.c.evaluation_id == row.id)
    versions = sorted(service.registry.by_id(v).name for v in connection.execute(statement).scalars())
    return EvaluationInfo(
        id=row.id,
        name=row.name,
        kind=row.kind,
        size=row.size,
        labelled=row.labelled,
        relevant=row.relevant,
        versions=versions,
        created=row.created,
    )
