"""Evaluation sets: images, texts or embeddings that a user uploads once, for gates and curves to measure on.

Each entry has a label, or names the items of the gallery that are relevant to it. A set belongs to a gallery, but its
entries are not items. A set is stored completely or, if an entry is invalid, not at all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import Connection, delete, insert, select

from index.errors import RegraftError
from regraft.models import EvaluationInfo, EvaluationList
from service.http.bodies.forms import read_form
from service.http.bodies.media_types import FORM, JSON, media_type
from service.http.requests.checked_route import CheckedRoute, read_body
from service.http.requests.dependencies import CONFIRMED, RequestContext, Service
from service.http.upgrades.evaluation_bodies import EVALUATION_BODY, EvaluationDraft, by_images, by_json
from service.items.transaction import write_contents
from service.runtime import Runtime
from service.schemas import Name, Number
from service.store.audit import ChangeContext, record
from service.store.galleries.gallery import gallery_named, take_seq
from service.store.image_store.keys import TEXT as TEXT_KEY
from service.store.rows import EvaluationRow, one_of
from service.store.tables import evaluation, evaluation_embedding, evaluation_entry
from service.store.vectors.codec import to_bytes
from service.upgrades.gates.samples import evaluation_row, evaluation_rows

router = APIRouter(route_class=CheckedRoute, tags=["evaluations"])


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
