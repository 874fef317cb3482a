"""Deployments over HTTP: begin, advance, list, show, roll back, retire; `upgrades.deployments` does the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy import Connection

from index.encoders.encoder import check_edge, verify_version
from regraft.models import (
    DeploymentDetail,
    DeploymentInfo,
    DeploymentList,
    RetireResult,
    RollbackResult,
    TransitionInfo,
)
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.dependencies import LOADED, IfMatchContext, Newest, Service
from service.http.upgrades.deployment_requests import (
    AdvanceIn,
    DeploymentIn,
    check_options,
    steps_to,
    transition_request,
)
from service.registry.edge_records import EdgeOrigin
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.registry.trial_counters import summary
from service.registry.trial_records import report_of
from service.runtime import Runtime
from service.schemas import Body, Name, Number, Reason
from service.store.audit import ChangeContext
from service.store.galleries.gallery import gallery_named
from service.store.rows import DeploymentRow
from service.upgrades.deployments.history import DeploymentState, deployment_row, etag, history, transitions
from service.upgrades.deployments.lifecycle import begin, lock, move, roll_back
from service.upgrades.deployments.notes import cancelled_backfills, notes
from service.upgrades.deployments.retiring import precheck, retire
from service.upgrades.deployments.transition import TransitionContext, TransitionRequest

router = APIRouter(route_class=CheckedRoute, tags=["deployments"])


class RollbackIn(Body):
    """The reason for a rollback; `force`: even if items become unreachable."""

    reason: Reason = ""
    force: bool = False


class RetireIn(Body):
    """A version to retire, whose embeddings are deleted, and the reason."""

    version: Name
    reason: Reason = ""


@router.post("/galleries/{name}/deployments", status_code=201, dependencies=[LOADED])
def create(
    name: Name, body: DeploymentIn, response: Response, service: Service, context: IfMatchContext
) -> DeploymentInfo:
    """Deploy a version: by default make it current at once, so that every query uses it over all stored items."""
    service.registry.sync()
    version = service.registry.named(body.version)
    until = DeploymentState(body.until)
    steps = steps_to(until, body.gate)
    check_options(body, steps)
    # Slow, so before the transaction, whose lock makes writers of this gallery wait.
    checked = {} if until is DeploymentState.REGISTERED else check_folder(service, version)
    with _change(service, name, response, context) as (connection, gallery_id):
        request = transition_request(body, context.who, until, context.if_match, checked, service.replica)
        transition = begin(connection, service.registry, gallery_id, version, request)
        for step in steps:
            move(transition, step)
        found_notes = notes(connection, service.registry, service.replica, transition.row)
    return _answer(service, response, gallery_id, transition.row, context, found_notes)


@router.get("/galleries/{name}/deployments")
def list_all(name: Name, response: Response, service: Service, limit: Newest = None) -> DeploymentList:
    """List a gallery's deployments, oldest first; `limit`: only the newest. The ETag covers all of them."""
    with service.database.read() as connection:
        gallery_id = gallery_named(connection, name).id
        rows = history(connection, gallery_id, limit)
        response.headers["ETag"] = etag(connection, gallery_id)
    return DeploymentList(deployments=[describe(service.registry, row) for row in rows])


@router.get("/galleries/{name}/deployments/{number}")
def show(name: Name, number: Number, response: Response, service: Service) -> DeploymentDetail:
    """Show a deployment, its steps, and the counts of its shadow or canary."""
    with service.database.read() as connection:
        row = deployment_row(connection, gallery_named(connection, name).id, number)
        steps = transitions(connection, number)
        reports = report_of(connection, number)
        response.headers["ETag"] = etag(connection, row.gallery_id)
    return DeploymentDetail(
        **describe(service.registry, row).model_dump(),
        since=row.since,
        undoes=row.undoes_id,
        settings=row.settings,
        transitions=[TransitionInfo.model_validate(step, from_attributes=True) for step in steps],
        trial={phase: summary(report) for phase, report in reports.items()},
    )


@router.post("/galleries/{name}/deployments/{number}/advance", dependencies=[LOADED])
def advance(
    name: Name, number: Number, body: AdvanceIn, response: Response, service: Service, context: IfMatchContext
) -> DeploymentInfo:
    """Move a deployment to its next state."""
    to = DeploymentState(body.to)
    check_options(body, [to])
    with service.database.lookup() as connection:
        row = deployment_row(connection, gallery_named(connection, name).id, number)
    checked = check_folder(service, service.registry.by_id(row.version_id)) if to is DeploymentState.VERIFIED else {}
    with _change(service, name, response, context) as (connection, gallery_id):
        locked = lock(connection, gallery_id, context.if_match)
        request = transition_request(body, context.who, to, None, checked, service.replica)
        row = deployment_row(connection, locked.id, number)
        transition = TransitionContext(connection, service.registry, locked, row, request)
        move(transition, to)
        found_notes = notes(connection, service.registry, service.replica, transition.row)
    return _answer(service, response, gallery_id, transition.row, context, found_notes, done=200)


@router.post("/galleries/{name}/rollback", status_code=201, dependencies=[LOADED])
def create_rollback(
    name: Name, response: Response, service: Service, context: IfMatchContext, body: RollbackIn | None = None
) -> RollbackResult:
    """Roll back: end the deployment in progress, or else make the previous version current again.

    Items with embeddings of that version return to it at once. Refused without `force` if items that queries reach now
    would become unreachable.
    """
    body = body or RollbackIn()
    with _change(service, name, response, context) as (connection, gallery_id):
        request = TransitionRequest(
            context.who, service.replica, body.reason, if_match=context.if_match, force=body.force
        )
        row = roll_back(connection, service.registry, gallery_id, request)
        step = transitions(connection, row.id)[-1]
    answer = _answer(service, response, gallery_id, row, context, list(cancelled_backfills(step)))
    return RollbackResult(**answer.model_dump(), out_of_reach=step.evidence.get("out_of_reach", {}))


@router.post("/galleries/{name}/retire")
def create_retirement(
    name: Name, body: RetireIn, response: Response, service: Service, context: IfMatchContext
) -> RetireResult:
    """Retire a version: delete its embeddings and shards; refused while items depend on them."""
    service.registry.sync()
    version = service.registry.named(body.version)
    prechecked = precheck(service.database, service.registry, name, version, context.if_match)
    with _change(service, name, response, context) as (connection, gallery_id):
        request = TransitionRequest(context.who, service.replica, body.reason, context.if_match)
        numbers = retire(connection, service.registry, gallery_id, version, request, prechecked)
        freed = transitions(connection, numbers[-1])[-1].evidence
    if not context.dry_run:
        service.reaper.free(gallery_id, version.id)
        service.replica.refresh(gallery_id)
    return RetireResult(version=version.name, deployments=numbers, **freed)


@contextmanager
def _change(
    service: Runtime, name: str, response: Response, context: ChangeContext
) -> Iterator[tuple[Connection, int]]:
    """A transaction on a gallery's deployments; sets the ETag of the response.

    A dry run gets the ETag from before it: its own state never exists, and another change could get that number.
    """
    with service.database.write(dry_run=context.dry_run) as connection:
        gallery_id = gallery_named(connection, name).id
        if context.dry_run:
            response.headers["ETag"] = etag(connection, gallery_id)
        yield connection, gallery_id
        if not context.dry_run:
            response.headers["ETag"] = etag(connection, gallery_id)


def check_folder(service: Runtime, version: LoadedVersion) -> dict[str, Any]:
    """Repeat the checks of a registration, and check that the folder is still the registered one.

    Edges that were removed since, perhaps with their old versions, are not checked.

    Raises:
        VersionBroken: it is quarantined; if its folder has changed, from now on. Names the file.
    """
    version.check_folder()
    cards = {known.name: known.card for known in service.registry.all()}
    with version.opening():
        verify_version(version.version.folder)
        for declared in service.registry.edges():
            if declared.origin is EdgeOrigin.REGISTERED and declared.edge.new == version.name:
                check_edge(declared.edge, version.card, cards[declared.edge.old])
    return {"card_sha256": version.card_sha256, "files": len(version.card.files)}


def describe(registry: Registry, row: DeploymentRow) -> DeploymentInfo:
    """The public description of a deployment."""
    return DeploymentInfo(
        id=row.id,
        version=registry.by_id(row.version_id).name,
        previous=None if row.previous_id is None else registry.by_id(row.previous_id).name,
        state=row.state,
        gate=row.gate_id,
        reason=row.reason,
        created=row.created,
        activated=row.activated,
    )


def _answer(
    service: Runtime,
    response: Response,
    gallery_id: int,
    row: DeploymentRow,
    context: ChangeContext,
    found_notes: Sequence[str] = (),
    done: int = 201,
) -> DeploymentInfo:
    response.status_code = context.status(done)
    described = describe(service.registry, row).model_copy(update={"notes": list(found_notes)})
    if context.dry_run:
        return described.model_copy(update={"id": None})
    service.replica.refresh(gallery_id)
    return described
