"""Gates over HTTP: measure a version against the current one, store the report, show it as JSON or as a page."""

from __future__ import annotations

import time
from dataclasses import asdict

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse
from sqlalchemy import Connection, insert, select

from index.errors import RegraftError
from regraft.models import GateList, GateReport
from service.errors import NoCurrentVersion
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.dependencies import Newest, RequestContext, Service
from service.http.upgrades.gate_images import flip_blobs, thumbnails
from service.http.upgrades.gate_page import page
from service.registry.calibrations import store_calibrations
from service.schemas import Name, Number
from service.store.galleries.gallery import gallery_named, take_seq
from service.store.rows import GateRow, first_of, newest_of, one_of
from service.store.tables import gate_report
from service.upgrades.gates.maps import best_mode, fit_calibrations, live_places
from service.upgrades.gates.measuring import measure
from service.upgrades.gates.request import GateIn, take_sample

router = APIRouter(route_class=CheckedRoute, tags=["gates"])


class UnknownGate(RegraftError):
    """The gallery has no gate report of this number."""

    status = 404
    code = "unknown_gate"


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
    contents = (service.blobs, service.decoder)
    sample = take_sample(service.database, service.registry, contents, gallery.id, (old, new), places, body)
    report = measure(service.registry, old, new, sample, body.model_dump())
    maps = fit_calibrations(service.registry, old, new, sample, places, body.seed)
    chosen = best_mode(service.registry, old, new, sample, report["metric"], body.seed)
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
        store_calibrations(connection, service.registry, gallery.id, stored.id, maps, evidence, modes, edges)
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


def describe(row: GateRow) -> GateReport:
    """The public form of a gate report."""
    return GateReport(id=row.id, created=row.created, **row.report)


def _row(connection: Connection, name: str, number: int) -> GateRow:
    condition = (gate_report.c.id == number, gate_report.c.gallery_id == gallery_named(connection, name).id)
    row = first_of(GateRow, connection.execute(select(gate_report).where(*condition)))
    if row is None:
        raise UnknownGate(f"gallery {name!r} has no gate report {number}")
    return row
