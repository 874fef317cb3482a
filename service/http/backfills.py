"""Backfills over HTTP: start (or estimate), list, show, pause, resume, cancel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import Field
from sqlalchemy import Connection, insert, select

from index.errors import InvalidArgument, NoEncoder, NoRoute, RegraftError
from index.metadata.filter import parse_filter
from regraft.models import BackfillEstimate, BackfillInfo, BackfillList
from service.backfills.embedder import Embedder
from service.backfills.estimates import estimate, estimate_supplied
from service.backfills.orders import Scope, check_uncertainty_known
from service.backfills.planner import ACTIVE, BackfillState, Kind, change_state, forward_from
from service.backfills.records import UnknownBackfill, backfill_row, backfill_rows
from service.backfills.supplied import SUPPLIED, finish_if_complete
from service.backfills.sweeps import new_sweep_columns
from service.http.backfill_progress import describe, snapshot
from service.http.request_context import RequestContext
from service.http.requests import KEY_OPENS_BACKFILL, CheckedRoute, Newest, Service
from service.registry.registry import LoadedVersion, Registry
from service.runtime import Runtime
from service.schemas import MAX_CHUNK, Body, Name, Number
from service.store.audit import ChangeContext, record
from service.store.repository import gallery_named, gallery_row, take_seq
from service.store.rows import BackfillRow, first_of, one_of
from service.store.sql_time import now
from service.store.tables import backfill
from service.upgrades.curves.measure import StartedCurve
from service.upgrades.curves.points import curve_of
from service.upgrades.curves.probes import CurveIn

router = APIRouter(route_class=CheckedRoute, tags=["backfills"])

CHUNK_SIZE = {Kind.REENCODE: 64, Kind.TRANSFORM: 2048}
"""Items per chunk: enough that claim and commit cost little compared with computing."""
RATED_SECONDS = 0.5
"""Most seconds that a chunk takes at the backfill's rate; otherwise its first chunk would exceed the rate."""


class BackfillActive(RegraftError):
    """The gallery has a backfill that is running or paused."""

    status = 409
    code = "backfill_active"


class BackfillEnded(RegraftError):
    """The backfill is done or cancelled."""

    status = 409
    code = "backfill_ended"


class NotCurrent(RegraftError):
    """A backfill moves items to the gallery's current version only."""

    status = 409
    code = "not_current"


class BackfillIn(Body):
    """What to move, in which order, and how fast: `rate` is items per second over all workers.

    `version` must be the current one. `share` (of the items that qualify at the start) and `limit` restrict how many
    items move; `origin` restricts them by their active embedding, `filter` by their metadata when they are planned
    (docs/filters.md). `supplied` waits for embeddings from outside, of all items. `attempts`: how often an item is
    tried before it is given up. `curve`: what to measure meanwhile.
    """

    version: Name | None = None
    kind: Literal["reencode", "transform", "supplied"] = "reencode"
    order: Literal["random", "newest", "oldest", "uncertainty", "traffic", "transformed"] = "random"
    chunk_size: Annotated[int | None, Field(ge=1, le=MAX_CHUNK)] = None
    rate: Annotated[float | None, Field(ge=0.001)] = None
    share: Annotated[float | None, Field(gt=0, le=1)] = None
    limit: Annotated[int | None, Field(ge=1, lt=1 << 31)] = None
    origin: Literal["encoded", "transformed", "supplied"] | None = None
    filter: dict[str, Any] | None = None
    attempts: Annotated[int, Field(ge=1, le=10)] = 3
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
        with _checked_scope(service, name, body) as (_, embedder, _, scope):
            check_uncertainty_known(service.database, service.registry, embedder, scope)
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
    response.headers["Location"] = f"/v1/backfills/{row.id}"
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


def start(
    connection: Connection,
    registry: Registry,
    gallery_id: int,
    request: BackfillIn,
) -> BackfillRow:
    """Add a backfill and return its row; the caller has it planned.

    Raises:
        NoCurrentVersion, NotCurrent: the target is not the gallery's current version.
        VersionBroken, EdgeBroken: the target, or an item edge to it, is quarantined.
        BackfillActive: another one is running or paused.
        NoEncoder: `reencode` to a version without an encoder.
        NoRoute: `transform` to a version without any item edge.
    """
    if request.filter is not None:
        parse_filter(request.filter)
    seq = take_seq(connection, gallery_id, 0)
    target = _target(connection, registry, gallery_id, request.version)
    _check_free(connection, gallery_id)
    _check_possible(connection, registry, request, target)
    values = {
        "gallery_id": gallery_id,
        "version_id": target.id,
        "kind": request.kind,
        "item_order": request.order,
        "state": BackfillState.RUNNING,
        "chunk_size": _chunk_size(request),
        "rate": request.rate,
        "next_claim": now(),
        "total": 0,
        "created": now(),
        # The running time begins after planning, during which nothing moves.
        "resumed": now() if request.kind == SUPPLIED else None,
        "share": request.share,
        "item_limit": request.limit,
        "origin": request.origin,
        "filter": request.filter,
        "attempts": request.attempts,
        **new_sweep_columns(seq),
    }
    return one_of(BackfillRow, connection.execute(insert(backfill).values(values).returning(backfill)))


def _chunk_size(request: BackfillIn) -> int:
    if request.kind == SUPPLIED:
        return 1  # there are no chunks
    size = request.chunk_size or CHUNK_SIZE[Kind(request.kind)]
    return size if request.rate is None else max(1, min(size, int(request.rate * RATED_SECONDS)))


def _begin_curve(service: Runtime, name: str, request: BackfillIn, curve: CurveIn) -> StartedCurve:
    """Embed the queries of a curve and measure its first point, before the transaction that locks the gallery."""
    with _checked_scope(service, name, request) as (connection, _, target, scope):
        chosen = service.curves.choose(connection, scope.gallery_id, target, curve)
    return service.curves.begin(name, target, chosen)


def _estimate(service: Runtime, name: str, request: BackfillIn) -> BackfillEstimate:
    with _checked_scope(service, name, request) as (connection, embedder, target, scope):
        if request.curve is not None:
            service.curves.choose(connection, scope.gallery_id, target, request.curve)
        if request.kind == SUPPLIED:
            return estimate_supplied(service.registry, connection, target, scope)
        if request.order == "uncertainty":
            check_uncertainty_known(service.database, service.registry, embedder, scope)
        return estimate(service.database, service.registry, connection, embedder, target, scope, request)


@contextmanager
def _checked_scope(
    service: Runtime, name: str, request: BackfillIn
) -> Iterator[tuple[Connection, Embedder, LoadedVersion, Scope]]:
    """Check a backfill without adding it; target and scope within one read transaction. Raises as `start`."""
    with service.database.read() as connection:
        gallery_id = gallery_named(connection, name).id
        target = _target(connection, service.registry, gallery_id, request.version)
        _check_free(connection, gallery_id)
        _check_possible(connection, service.registry, request, target)
        yield connection, service.embedder, target, Scope(gallery_id, request.kind, target.id, request.origin)


def _target(connection: Connection, registry: Registry, gallery_id: int, name: str | None) -> LoadedVersion:
    row = gallery_row(connection, gallery_id)
    assert row is not None
    current = registry.current_of(row)
    if name is not None and registry.named(name) is not current:
        raise NotCurrent(f"version {name!r} is not current ({current.name!r} is): deploy it first", pointer="/version")
    return current


def _check_free(connection: Connection, gallery_id: int) -> None:
    active = select(backfill).where(backfill.c.gallery_id == gallery_id, backfill.c.state.in_(ACTIVE))
    if row := first_of(BackfillRow, connection.execute(active)):
        raise BackfillActive(f"backfill {row.id} of this gallery is {row.state}: wait for it or cancel it")


def _check_possible(connection: Connection, registry: Registry, request: BackfillIn, target: LoadedVersion) -> None:
    if request.kind == SUPPLIED:
        limiting = ("chunk_size", "rate", "share", "limit", "origin", "filter")
        if present := [name for name in limiting if getattr(request, name) is not None]:
            why = f"a supplied backfill includes all items: omit {present[0]}"
            raise InvalidArgument(why, pointer=f"/{present[0]}")
        if request.order != "random":
            raise InvalidArgument("a supplied backfill has no order: omit order", pointer="/order")
        return
    kind = Kind(request.kind)
    target.check()
    if kind is Kind.REENCODE and not (target.card.encoder or target.card.text):
        raise NoEncoder(
            f"kind reencode requires an encoder, which version {target.name!r} does not have", pointer="/kind"
        )
    if kind is Kind.TRANSFORM and connection.execute(forward_from(target.id)).first() is None:
        raise NoRoute(
            f"kind transform requires a forward edge to version {target.name!r}, which does not exist", pointer="/kind"
        )
    for declared in registry.item_edges_to(target) if kind is Kind.TRANSFORM else ():
        declared.check()


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
