"""Gates over HTTP: measure a version against the current one, store the report, show it as JSON or as a page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Literal

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse
from pydantic import Field
from sqlalchemy import Connection, insert, select

from index.errors import InvalidArgument, RegraftError
from regraft.models import GateList, GateReport
from service.errors import NoCurrentVersion
from service.http.gate_images import flip_blobs, thumbnails
from service.http.gate_page import page
from service.http.request_context import RequestContext
from service.http.requests import CheckedRoute, Newest, Service
from service.registry.calibrations import store
from service.registry.registry import LoadedVersion
from service.registry.stored_contents import embeds
from service.runtime import Runtime
from service.schemas import Body, FieldPath, Name, Number, Seed
from service.store.repository import gallery_named, take_seq
from service.store.rows import GateRow, first_of, newest_of, one_of
from service.store.tables import gate_report
from service.upgrades.gates.maps import Place, choose_mode, fit, live_places
from service.upgrades.gates.measuring import RECALL, TAR, default_metric, measure
from service.upgrades.gates.relevance import live_keys, with_queries
from service.upgrades.gates.samples import (
    Entry,
    Sample,
    embed,
    evaluation_row,
    read_embeddings,
    read_entries,
    with_labels,
)
from service.upgrades.gates.sides import DrawnSides, DrawOptions, draw_sides, embed_sides

router = APIRouter(route_class=CheckedRoute, tags=["gates"])


class UnknownGate(RegraftError):
    """The gallery has no gate report of this number."""

    status = 404
    code = "unknown_gate"


class GateIn(Body):
    """What to measure on: the evaluation set `evaluation`, else items of the gallery.

    Up to `sample` items, drawn by `seed`, are queries over the whole gallery, or over a sample if it is too large.
    Items with the same value of the metadata field `label` are relevant to each other. Entries of an evaluation set
    have their own labels, unless `label` is given, or name the relevant items of the gallery, over which they are then
    queries; all of them are, so that `sample` is refused. `far` and `k` are refused with metrics that do not use them;
    the default of these three is legal everywhere. Without labels and relevant items, only `recall@k` can be measured.
    `slice` is a metadata field; the metric is also measured for each of its values. A field is a key, or a path of keys
    such as `outer.inner`.
    """

    version: Name
    label: FieldPath | None = None
    evaluation: Number | None = None
    slice: FieldPath | None = None
    sample: Annotated[int, Field(ge=2, le=100_000)] = 1000
    metric: Literal["cmc@1", "cmc@5", "mAP@1.0", "TAR@FAR", "recall@k"] | None = None
    far: Annotated[float, Field(gt=0, lt=1)] = 0.01
    k: Annotated[int, Field(ge=1, le=1000)] = 10
    seed: Seed = 0


@router.post("/galleries/{name}/gates", status_code=201)
def create(name: Name, body: GateIn, response: Response, service: Service, context: RequestContext) -> GateReport:
    """Measure a version against the current one, and fit the calibrations for its deployment."""
    service.registry.sync()
    edges = service.registry.edges()
    new = service.registry.named(body.version)
    new.check()
    with service.database.read() as connection:
        gallery = gallery_named(connection, name)
        if gallery.current_id is None:
            raise NoCurrentVersion(f"gallery {name!r} has no current version to compare with: deploy without a gate")
        places = live_places(connection, service.registry, gallery)
    old = service.registry.current_of(gallery)
    sample = take_sample(service, gallery.id, old, new, places, body)
    report = measure(service.registry, old, new, sample, body.model_dump())
    maps = fit(service.registry, old, new, sample, places, body.seed)
    chosen = choose_mode(service.registry, old, new, sample, report["metric"], body.seed)
    report |= {"calibrations": len(maps), "who": context.who, "merge": chosen and asdict(chosen[1])}
    response.status_code = context.status(201)
    row = {"gallery_id": gallery.id, "version_id": new.id, "verdict": report["verdict"], "report": report}
    with service.database.write(dry_run=context.dry_run) as connection:
        # By its id, as another gallery may have the name by now.
        take_seq(connection, gallery.id, 0)
        statement = insert(gate_report).values(**row, created=time.time()).returning(gate_report)
        stored = one_of(GateRow, connection.execute(statement))
        evidence = {"labelled": report["labelled"], "entries": report["items"], "seed": body.seed}
        modes = {chosen[0]: chosen[1].mode.value} if chosen else {}
        store(connection, service.registry, gallery.id, stored.id, maps, evidence, modes, edges)
    shown = describe(stored)
    return shown.model_copy(update={"id": None}) if context.dry_run else shown


@router.get("/galleries/{name}/gates")
def list_all(name: Name, service: Service, limit: Newest = None) -> GateList:
    """List a gallery's gate reports, oldest first; `limit`: only the newest."""
    with service.database.read() as connection:
        statement = select(gate_report).where(gate_report.c.gallery_id == gallery_named(connection, name).id)
        rows = newest_of(GateRow, connection, statement, gate_report.c.id, limit)
    return GateList(gates=[describe(row) for row in rows])


@router.get("/galleries/{name}/gates/{number}")
def show(name: Name, number: Number, service: Service) -> GateReport:
    """Show a gate report."""
    with service.database.read() as connection:
        return describe(_row(connection, name, number))


@router.get("/galleries/{name}/gates/{number}/page", response_class=HTMLResponse)
def show_page(name: Name, number: Number, service: Service) -> Response:
    """Get a gate report as one self-contained HTML page with plots and images of flips."""
    with service.database.read() as connection:
        row = _row(connection, name, number)
        report = describe(row)
        keys = flip_blobs(connection, row.gallery_id, report.model_dump())
    content = page(name, report, thumbnails(service.blobs, service.decoder, keys))
    headers = {
        "Content-Disposition": f'inline; filename="gate-{number}.html"',
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    }
    return Response(content, media_type="text/html", headers=headers)


def take_sample(
    service: Runtime, gallery_id: int, old: LoadedVersion, new: LoadedVersion, places: Sequence[Place], request: GateIn
) -> Sample:
    """The sample to measure on, embedded by both versions, and by others whose items also need a calibration.

    Raises:
        UnknownEvaluation: the gallery has no such evaluation set, or it was deleted meanwhile.
        InvalidArgument: fewer than two entries can be used, none has the slice's field, embeddings are missing, or an
            option has no effect.
        NoEncoder: one of the two versions has no encoder.
    """
    other_encoders = {
        version: None
        for version, _ in places
        if version not in (old, new) and (version.card.encoder or version.card.text)
    }
    with service.database.read() as connection:
        if request.evaluation is None:
            _check_effects(request, labelled=request.label is not None)
            options = DrawOptions(
                request.label, request.slice, request.sample, request.seed, _uses_own_ranking(request)
            )
            drawn = draw_sides(connection, gallery_id, old, new, options)
            _check_slice(request, drawn.entries)
        else:
            evaluation = evaluation_row(connection, gallery_id, request.evaluation)
            entries = read_entries(connection, evaluation.id, request.slice, request.label)
            relevant = any(entry.relevant for entry in entries)
            used = entries if relevant or request.metric == RECALL else with_labels(entries)
            _check_effects(request, labelled=relevant or all(entry.label is not None for entry in used))
            _check_slice(request, used)
            if relevant:
                drawn = _draw_relevant(connection, gallery_id, old, new, entries, request)
            sample = None
            if evaluation.kind == "embeddings":
                sample = read_embeddings(connection, service.registry, evaluation.id, used, (old, new))
    if request.evaluation is None:
        return embed_sides(service.blobs, service.decoder, drawn, old, new, list(other_encoders))
    if sample is None:
        usable = [
            version for version in other_encoders if used[0].blob is not None and embeds(version.card, used[0].blob)
        ]
        sample = embed(service.blobs, service.decoder, used, [old, new, *usable])
        if sample.unreadable:
            with service.database.read() as connection:  # deleted meanwhile, with its images
                evaluation_row(connection, gallery_id, evaluation.id)
    if len(sample) < 2:
        raise InvalidArgument("fewer than two images of the sample can be read", pointer="/label")
    if relevant:
        return with_queries(sample, embed_sides(service.blobs, service.decoder, drawn, old, new, ()))
    return replace(sample, unlabelled=len(entries) - len(used))


def _draw_relevant(
    connection: Connection,
    gallery_id: int,
    old: LoadedVersion,
    new: LoadedVersion,
    entries: Sequence[Entry],
    request: GateIn,
) -> DrawnSides:
    """The sides for entries that name relevant items: those items first, then others."""
    if request.label is not None:
        raise InvalidArgument("the evaluation set has relevant items: omit label", pointer="/label")
    first = list(live_keys(connection, gallery_id, entries).values())
    options = DrawOptions(None, None, 0, request.seed, outside_queries=len(entries), first=first)
    return draw_sides(connection, gallery_id, old, new, options)


def _uses_own_ranking(request: GateIn) -> bool:
    """Whether the new version's own ranking is the ground truth, and has to be over the same items."""
    return (request.metric or default_metric(request.label is not None)) == RECALL


def _check_effects(request: GateIn, *, labelled: bool) -> None:
    """Refuse an option that this gate does not use, unless it has its default, which a client may always send."""
    metric, default = request.metric or default_metric(labelled), GateIn.model_fields
    for name, used_by in (("far", TAR), ("k", RECALL)):
        if metric != used_by and getattr(request, name) != default[name].default:
            why = f"{name} is only legal with metric {used_by}, and this gate measures {metric}"
            raise InvalidArgument(why, pointer=f"/{name}")
    if request.evaluation is not None and request.sample != default["sample"].default:
        why = "sample is only legal without evaluation, every entry of which is a query"
        raise InvalidArgument(why, pointer="/sample")


def _check_slice(request: GateIn, entries: Sequence[Entry]) -> None:
    if request.slice is not None and all(entry.slice is None for entry in entries):
        raise InvalidArgument(f"slice: no entry has the metadata field {request.slice!r}", pointer="/slice")


def describe(row: GateRow) -> GateReport:
    """The public form of a gate report."""
    return GateReport(id=row.id, created=row.created, **row.report)


def _row(connection: Connection, name: str, number: int) -> GateRow:
    condition = (gate_report.c.id == number, gate_report.c.gallery_id == gallery_named(connection, name).id)
    row = first_of(GateRow, connection.execute(select(gate_report).where(*condition)))
    if row is None:
        raise UnknownGate(f"gallery {name!r} has no gate report {number}")
    return row
