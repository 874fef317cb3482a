"""Edges over HTTP: list with their evidence, add, remove; `upgrades.edges.changes` makes the changes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Literal

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from index.edges.transform import Transform, load_transform
from index.errors import InvalidArgument
from index.incoming import incoming_folder
from index.isolated import check_edge_isolated
from index.query.edge_maps import check_calibration
from index.version import EDGE, Edge, EdgeKind
from index.version_folder.archive import unpack_version
from index.version_folder.folder import load_edge
from regraft.models import DependentGallery, EdgeInfo, EdgeList, EdgeRemoval, ReroutedItems
from service.errors import InvalidBody
from service.http.bodies.forms import Form, read_form
from service.http.bodies.media_types import FORM, JSON, media_type
from service.http.bodies.schemas import FILE, SWITCH, fields, reads
from service.http.bodies.strict_json import parse_json
from service.http.requests.checked_route import CheckedRoute, read_body
from service.http.requests.dependencies import CONFIRMED, RequestContext, Service
from service.registry.edge_records import EdgeOrigin, EdgeRecord
from service.registry.loaded_version import LoadedVersion
from service.runtime import Runtime
from service.schemas import MOST, NAME, Body, KindName, Name, Reason
from service.store.api_keys import ApiKeyRow
from service.store.audit import ChangeContext
from service.upgrades.edges.changes import accept, both_versions, check_no_edge, find, remove
from service.upgrades.edges.claims import ITEMS, VerifyIn, measure, verify
from service.upgrades.edges.dependents import Dependent

router = APIRouter(route_class=CheckedRoute, tags=["edges"])

FLAG = {"true": True, "false": False}

ADD_BODY = reads(
    form=fields({"archive": FILE, "new": NAME, "old": NAME, "replace": SWITCH}, required=("archive", "new", "old")),
    json=fields(
        {
            "new": NAME,
            "old": NAME,
            "kind": {"type": "string", "enum": ["identity", "truncate", "zero_pad"]},
            "verify": fields(
                {
                    "gallery": {**NAME, "type": ["string", "null"], "default": None},
                    "items": {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 100},
                    "seed": {"type": "integer", "minimum": 0, "maximum": MOST, "default": 0},
                },
                description="what the two versions are compared on",
            ),
            "replace": SWITCH,
        },
        required=("new", "old", "kind"),
    ),
)


OF_ITEMS = {"gallery", "label", "held", "embedded", ITEMS}
"""Details of an edge that tell of the items it was fitted or compared on."""


class EdgeIn(Body):
    """An edge that needs no files; `verify`: what it is verified on."""

    new: Name
    old: Name
    kind: Literal["identity", "truncate", "zero_pad"]
    verify: VerifyIn | None = None
    replace: bool = False


@router.get("/edges")
def list_all(request: Request, service: Service, new: Name | None = None, old: Name | None = None) -> EdgeList:
    """List all edges, or only those from `new` or to `old`."""
    service.registry.sync()
    for name in (n for n in (new, old) if n is not None):
        service.registry.named(name)
    records = [d for d in service.registry.edges() if new in {None, d.edge.new} and old in {None, d.edge.old}]
    return EdgeList(edges=[_shown_to(request, declared) for declared in records])


@router.get("/edges/{new}/{old}/{kind}")
def show(new: Name, old: Name, kind: KindName, request: Request, service: Service) -> EdgeInfo:
    """Show an edge with its measured scores."""
    service.registry.sync()
    return _shown_to(request, find(service.registry, (new, old, kind)))


@router.post("/edges", status_code=201, openapi_extra=ADD_BODY)
async def add(request: Request, response: Response, service: Service, context: RequestContext) -> EdgeInfo:
    """Add an edge: an edge folder as the .zip file `archive`, or, as JSON, a kind that needs no files.

    As JSON, an `identity` claims that both versions are one model; it is verified before it is accepted. `truncate` and
    `zero_pad` are measured on the items of `verify`, and refused if they find nothing.
    """
    response.status_code = context.status(201)
    if media_type(request, JSON, FORM) == JSON:
        raw = await read_body(request, service.settings.max_model_bytes)
        return describe(await service.run_write(add_plain, service, raw, context))
    names = {"new", "old", "replace"}
    async with read_form(request, files="archive", fields=names, max_files=1, max_field_bytes=1024) as form:
        return describe(await service.run_write(add_archive, service, form, context))


@router.delete("/edges/{new}/{old}/{kind}", dependencies=[CONFIRMED])
def delete(
    new: Name,
    old: Name,
    kind: KindName,
    service: Service,
    context: RequestContext,
    force: bool = False,
    reason: Reason = "",
) -> EdgeRemoval:
    """Remove an edge. Refused if items would become unreachable, unless forced with a reason."""
    removal = remove(
        service.database, service.registry, service.replica, (new, old, kind), context, force=force, reason=reason
    )
    return EdgeRemoval(
        edge=describe(removal.edge),
        removed=not context.dry_run,
        dependents=[_dependent(d) for d in removal.dependents],
        blocked_by=list(removal.blocked_by),
    )


def add_archive(service: Runtime, form: Form, context: ChangeContext) -> EdgeRecord:
    """Unpack, check and accept the folder of an edge.

    Raises:
        InvalidBody: a field is missing or invalid.
        InvalidVersionFolder: the folder is invalid; names the file and field.
    """
    if missing := next((name for name in ("new", "old") if name not in form.fields), None):
        raise InvalidBody(f"the form must have the field {missing!r}, the name of a version", pointer=f"/{missing}")
    archive = form.only_file("archive").file
    replacing = FLAG.get(form.fields.get("replace", "false"))
    if replacing is None:
        raise InvalidBody("replace must be true or false", pointer="/replace")
    service.registry.sync()
    new, old = both_versions(service.registry, form.fields["new"], form.fields["old"])
    with incoming_folder(service.settings.edges) as workspace:
        packed, folder = workspace / "archive.zip", workspace / "folder"
        _save(archive, packed)
        unpack_version(packed, folder, EDGE)
        edge = load_edge(folder, new.name, old.name)
        if edge.kind is EdgeKind.IDENTITY and not edge.scores:
            raise InvalidArgument(
                "an identity edge without scores must be verified: send it as JSON",
                pointer="/archive",
            )
        check_no_edge(service.registry, edge.key, replacing)
        check_edge_isolated(edge, new.card, old.card, service.settings.verifying)
        declared = EdgeRecord(edge, EdgeOrigin.ADDED)
        # An edge that cannot be described must not be committed: every list of edges would fail from then on.
        describe(declared).model_dump_json()
        return _accept(service, declared, (new, old), context, replacing)


def add_plain(service: Runtime, raw: bytes, context: ChangeContext) -> EdgeRecord:
    """Accept an edge that needs no files.

    Raises:
        RequestValidationError: the body is not an `EdgeIn`.
        NotIdentical, FindsNothing, NothingToVerifyOn: it could not be verified.
    """
    try:
        request = EdgeIn.model_validate(parse_json(raw))
    except ValidationError as error:
        raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in error.errors()]) from error
    service.registry.sync()
    new, old = both_versions(service.registry, request.new, request.old)
    kind = EdgeKind(request.kind)
    edge = Edge(new.name, old.name, kind, old_encoder=old.card.encoder)
    to_old = _check(service, edge, new, old, request.replace)
    asked = (service.database, service.blobs, service.decoder, new, old, request.verify or VerifyIn())
    if kind is EdgeKind.IDENTITY:
        origin, (evidence, scores) = EdgeOrigin.CLAIMED, verify(*asked)
    else:
        origin, (evidence, scores) = EdgeOrigin.ADDED, measure(*asked, to_old)
    declared = EdgeRecord(replace(edge, scores=scores), origin, evidence)
    return _accept(service, declared, (new, old), context, request.replace)


def _accept(
    service: Runtime,
    declared: EdgeRecord,
    ends: tuple[LoadedVersion, LoadedVersion],
    context: ChangeContext,
    replacing: bool,
) -> EdgeRecord:
    return accept(service.database, service.registry, service.replica, declared, ends, context, replacing=replacing)


def describe(declared: EdgeRecord) -> EdgeInfo:
    """The public description of an edge."""
    evidence = declared.edge.as_json()
    origin_details = {name: value for name, value in declared.made.items() if name != "warning"}
    return EdgeInfo(
        new=declared.edge.new,
        old=declared.edge.old,
        origin=declared.origin.value,
        made=origin_details,
        files=dict(declared.files),
        created=declared.created or None,
        warning=declared.made.get("warning"),
        problem=declared.problem or None,
        **evidence,
    )


def _shown_to(request: Request, declared: EdgeRecord) -> EdgeInfo:
    """The description of an edge, without what tells of galleries that the request's key does not permit."""
    described = describe(declared)
    key: ApiKeyRow | None = request.state.key
    if key is None or key.opens(declared.made.get("gallery") or ""):
        return described
    made = {name: value for name, value in described.made.items() if name not in OF_ITEMS}
    return described.model_copy(update={"made": made})


def _dependent(dependent: Dependent) -> DependentGallery:
    return DependentGallery(
        gallery=dependent.gallery,
        version=dependent.version,
        routes=[ReroutedItems.model_validate(r, from_attributes=True) for r in dependent.routes],
        moved=dependent.moved,
        lost=dependent.lost,
    )


def _check(service: Runtime, edge: Edge, new: LoadedVersion, old: LoadedVersion, replacing: bool) -> Transform:
    """Check an edge like a registration does, and that there is no other of its key; returns its transform."""
    check_no_edge(service.registry, edge.key, replacing)
    check_calibration(edge, new.card, old.card)
    return load_transform(edge, new.card, old.card)


def _save(stream: BinaryIO, to: Path) -> None:
    with to.open("wb") as out:
        shutil.copyfileobj(stream, out, 1 << 20)
