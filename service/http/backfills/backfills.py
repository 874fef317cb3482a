"""Backfills over HTTP: start (or estimate), list, show, pause, resume, cancel."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Response
from sqlalchemy import Connection

from index.errors import RegraftError
from regraft.models import BackfillEstimate, BackfillInfo, BackfillList
from service.backfills.estimates import estimate, estimate_supplied
from service.backfills.records import UnknownBackfill, backfill_row, backfill_rows
from service.backfills.starting import BackfillRequest, checked_scope, start
from service.backfills.states import ACTIVE, BackfillState, change_state
from service.backfills.supplied import SUPPLIED, finish_if_complete
from service.backfills.uncertainties import check_uncertainty_known
from service.http.backfills.access import KEY_OPENS_BACKFILL
from service.http.backfills.progress import describe, snapshot
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.dependencies import Newest, RequestContext, Service
from service.runtime import Runtime
from service.schemas import Name, Number
from service.store.audit import ChangeContext, record
from service.store.galleries.gallery import gallery_named, gallery_row
from service.store.rows import BackfillRow
from service.upgrades.curves.measure import StartedCurve
from service.upgrades.curves.points import curve_of
from service.upgrades.curves.probes import CurveIn

router = APIRouter(route_class=CheckedRoute, tags=["backfills"])


class BackfillEnded(RegraftError):
    """The backfill is done or cancelled."""

    status = 409
    code = "backfill_ended"


class BackfillIn(BackfillRequest):
    """What to move, in which order, and how fast: `rate` is items per second over all workers.

    `version` must be the current one. `share` (of the items that qualify at the start) and `limit` restrict how many
    items move; `origin` restricts them by their active embedding, `filter` by their metadata when they are planned
    (docs/filters.md). `supplied` waits for embeddings from outside, of all items. `attempts`: how often an item is
    tried before it is given up. `curve`: what to measure meanwhile.
    """

    curve: CurveIn | None = None


@router.post("/galleries/{name}/backfills", status_code=202)
def create(
    name: Name, body: BackfillIn, response: Response, service: Service, context: RequestContext
) -> BackfillInfo | BackfillEstimate:
    """Start a backfill to the gallery's current version; workers start once it is planned. `dry_run`: an estimate."""
    if context.dry_run:
        response.status_code = 200
        return _estimate(service, name, body)
    if body.order == "uncertainty" and body.kind != SUPPLIED:
        with checked_scope(service.database, service.registry, name, body) as (_, _, scope):
            check_uncertainty_known(service.database, service.registry, service.embedder, scope)
    curve = None if body.curve is None else _begin_curve(service, name, body, body.curve)
    # Move to the version that was measured, not to one that was deployed meanwhile.
    planned = body if curve is None else body.model_copy(update={"version": curve.version})
    with service.database.write() as connection:
        row = start(connection, service.registry, gallery_named(connection, name).id, planned)
        record(connection, context.who, "backfill_started", f"{name}/{row.id}", **body.model_dump())
        if curve is not None:
            service.curves.open(connection, row.id, curve)
    if curve is not None:
        service.curves.keep(row.id, curve)
    service.planner.plan(row)
    # Relative to this route's path, since the service may be behind a proxy, below a prefix.
    response.headers["Location"] = f"../../backfills/{row.id}"
    return snapshot(service, row.id).shown


@router.get("/galleries/{name}/backfills")
def list_all(name: Name, service: Service, limit: Newest = None) -> BackfillList:
    """List a gallery's backfills, oldest first; `limit`: only the newest."""
    with service.database.read() as connection:
        rows = backfill_rows(connection, gallery_named(connection, name).id, limit)
        return BackfillList(
            backfills=[describe(service.registry, name, row, curve_of(connection, row.id)) for row in rows]
        )


@router.get("/backfills/{number}", dependencies=[KEY_OPENS_BACKFILL])
def show(number: Number, service: Service) -> BackfillInfo:
    """Show the state and progress of a backfill."""
    return snapshot(service, number).shown


@router.post("/backfills/{number}/pause", dependencies=[KEY_OPENS_BACKFILL])
def pause(number: Number, service: Service, context: RequestContext) -> BackfillInfo:
    """Pause a backfill: no chunk is claimed or committed until it is resumed."""
    return _change_state(service, number, (BackfillState.RUNNING,), BackfillState.PAUSED, context)


@router.post("/backfills/{number}/resume", dependencies=[KEY_OPENS_BACKFILL])
def resume(number: Number, service: Service, context: RequestContext) -> BackfillInfo:
    """Resume a paused backfill."""
    return _change_state(service, number, (BackfillState.PAUSED,), BackfillState.RUNNING, context)


@router.post("/backfills/{number}/cancel", dependencies=[KEY_OPENS_BACKFILL])
def cancel(number: Number, service: Service, context: RequestContext) -> BackfillInfo:
    """Cancel a backfill; items already moved stay moved."""
    return _change_state(service, number, ACTIVE, BackfillState.CANCELLED, context)


def _begin_curve(service: Runtime, name: str, request: BackfillIn, curve: CurveIn) -> StartedCurve:
    """Embed the queries of a curve and measure its first point, before the transaction that locks the gallery."""
    with checked_scope(service.database, service.registry, name, request) as (connection, target, scope):
        chosen = service.curves.choose(connection, scope.gallery_id, target, curve)
    return service.curves.begin(name, target, chosen)


def _estimate(service: Runtime, name: str, request: BackfillIn) -> BackfillEstimate:
    with checked_scope(service.database, service.registry, name, request) as (connection, target, scope):
        if request.curve is not None:
            service.curves.choose(connection, scope.gallery_id, target, request.curve)
        if request.kind == SUPPLIED:
            return estimate_supplied(service.registry, connection, target, scope)
        if request.order == "uncertainty":
            check_uncertainty_known(service.database, service.registry, service.embedder, scope)
        return estimate(service.database, service.registry, connection, service.embedder, target, scope, request)


def _change_state(
    service: Runtime, number: int, before: Sequence[BackfillState], after: BackfillState, context: ChangeContext
) -> BackfillInfo:
    shown = _changed(service, number, before, after, context)
    if shown.planning:
        service.planner.look()
    return shown


def _changed(
    service: Runtime, number: int, before: Sequence[BackfillState], after: BackfillState, context: ChangeContext
) -> BackfillInfo:
    with service.database.write(dry_run=context.dry_run) as connection:
        changed = change_state(connection, number, before, after)
        row = backfill_row(connection, number)
        if changed and row.kind == SUPPLIED and after is BackfillState.RUNNING:
            finish_if_complete(connection, row)  # the last items may have arrived while it was paused
            row = backfill_row(connection, number)
        if not changed and row.state != after:
            raise BackfillEnded(f"backfill {number} is {row.state}")
        name = _gallery_name(connection, row)
        if changed:
            record(connection, context.who, f"backfill_{after}", f"{name}/{number}")
        return describe(service.registry, name, row, curve_of(connection, number))


def _gallery_name(connection: Connection, row: BackfillRow) -> str:
    found = gallery_row(connection, row.gallery_id)
    if found is None:  # deleted since, which is possible if the state did not change and so nothing is locked
        raise UnknownBackfill(f"backfill {row.id} was deleted with its gallery")
    return found.name
