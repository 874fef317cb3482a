"""Deployments: make a version current for a gallery, list, roll back. Each change is one transaction."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy import Connection, Row, insert, select, update

from index.errors import InvalidArgument, RegraftError
from service.catalog import Catalog, Registered
from service.placement import activate, check_reachable
from service.planner import ACTIVE, State
from service.repository import gallery_named, gallery_row, take_seq
from service.runtime import Service
from service.schemas import Body
from service.tables import backfill, deployment, gallery, gate_report

router = APIRouter(tags=["deployments"])


class AlreadyCurrent(RegraftError):
    """The version is the gallery's current one already."""

    status = 409
    code = "already_current"


class NothingToRollBack(RegraftError):
    """No version was current before."""

    status = 409
    code = "nothing_to_roll_back"


class GateRefused(RegraftError):
    """The gate refused this version; deploying it needs a written reason in `override`."""

    status = 422
    code = "gate_refused"


Reason = Annotated[str, Field(max_length=1024, pattern=r"^[^\x00]*$")]


class DeploymentIn(Body):
    """A version to make current; `gate` is the report it rests on, `override` why it is deployed despite a refusal."""

    version: str
    gate: Annotated[int | None, Field(ge=1, lt=1 << 63)] = None
    override: Reason | None = None


class RollbackIn(Body):
    """Why a gallery goes back."""

    reason: Reason = ""


class DeploymentOut(BaseModel):
    """A deployment: `previous` was current before it, `activated` items moved at once."""

    id: int
    version: str
    previous: str | None
    state: str
    gate: int | None
    reason: str
    created: float
    activated: int


class Deployments(BaseModel):
    """Every deployment of a gallery, oldest first."""

    deployments: list[DeploymentOut]


@router.post("/galleries/{name}/deployments", status_code=201)
def create(name: str, body: DeploymentIn, service: Service) -> DeploymentOut:
    """Make a version current: queries go through it at once, over everything that is stored."""
    service.catalog.sync()
    version = service.catalog.named(body.version)
    with service.database.write() as connection:
        gallery_id = gallery_named(connection, name).id
        row = deploy(connection, service.catalog, gallery_id, version, body.gate, body.override)
    service.replica.refresh(gallery_id)
    return describe(service.catalog, row)


@router.get("/galleries/{name}/deployments")
def list_all(name: str, service: Service) -> Deployments:
    """Every deployment of a gallery, oldest first."""
    with service.database.read() as connection:
        rows = _history(connection, gallery_named(connection, name).id)
    return Deployments(deployments=[describe(service.catalog, row) for row in rows])


@router.post("/galleries/{name}/rollback", status_code=201)
def create_rollback(name: str, service: Service, body: RollbackIn | None = None) -> DeploymentOut:
    """Go back to the version that was current before; items that hold its embeddings return to it at once."""
    with service.database.write() as connection:
        gallery_id = gallery_named(connection, name).id
        row = rollback(connection, service.catalog, gallery_id, body.reason if body else "")
    service.replica.refresh(gallery_id)
    return describe(service.catalog, row)


def deploy(
    connection: Connection,
    catalog: Catalog,
    gallery_id: int,
    version: Registered,
    gate: int | None = None,
    override: str | None = None,
) -> Row[Any]:
    """Make a version current and return the new deployment's row.

    Raises:
        AlreadyCurrent: it is.
        InvalidArgument: the gate is not of this gallery, or did not compare this version with the current one.
        GateRefused: the gate's verdict is `refuse` and there is no `override`.
        NoRoute: queries of the version could not reach some live items; the message names their versions.
    """
    before = _lock(connection, gallery_id)
    if before.current_id == version.id:
        raise AlreadyCurrent(f"version {version.name!r} is current already", pointer="/version")
    if gate is not None:
        _check_gate(connection, catalog, before, version, gate, override)
    row = _switch(connection, catalog, before, version, "superseded", gate_id=gate, reason=override or "")
    check_reachable(connection, catalog, gallery_id, version)
    return row


def rollback(connection: Connection, catalog: Catalog, gallery_id: int, reason: str = "") -> Row[Any]:
    """Make the version before the current one current again and return the new deployment's row.

    It is never refused for a missing route: items that only newer versions know are reported as degraded by queries.

    Raises:
        NothingToRollBack: there was none.
    """
    before = _lock(connection, gallery_id)
    standing = _standing(_history(connection, gallery_id))
    if len(standing) < 2:
        raise NothingToRollBack("no version was current before: there is nothing to roll back to")
    target = catalog.by_id(standing[-2].version_id)
    return _switch(connection, catalog, before, target, "rolled_back", gate_id=None, reason=reason)


def describe(catalog: Catalog, row: Row[Any]) -> DeploymentOut:
    """What a user sees of a deployment."""
    return DeploymentOut(
        id=row.id,
        version=catalog.by_id(row.version_id).name,
        previous=None if row.previous_id is None else catalog.by_id(row.previous_id).name,
        state=row.state,
        gate=row.gate_id,
        reason=row.reason,
        created=row.created,
        activated=row.activated,
    )


def _lock(connection: Connection, gallery_id: int) -> Row[Any]:
    """The gallery's row, ours until the commit. The number taken tells every replica that something changed."""
    take_seq(connection, gallery_id, 1)
    row = gallery_row(connection, gallery_id)
    assert row is not None
    return row


def _switch(
    connection: Connection, catalog: Catalog, before: Row[Any], version: Registered, left: str, **evidence: Any
) -> Row[Any]:
    """Everything a change of the current version changes; `left` is the state of the deployment that ends."""
    now = time.time()
    mine = deployment.c.gallery_id == before.id
    connection.execute(update(deployment).where(mine, deployment.c.state == "current").values(state=left))
    connection.execute(update(gallery).where(gallery.c.id == before.id).values(current_id=version.id))
    connection.execute(
        update(backfill)
        .where(backfill.c.gallery_id == before.id, backfill.c.version_id != version.id, backfill.c.state.in_(ACTIVE))
        .values(state=State.CANCELLED, finished=now)
    )
    row = {
        "gallery_id": before.id,
        "version_id": version.id,
        "previous_id": before.current_id,
        "state": "current",
        "activated": activate(connection, catalog, before.id, version),
        "created": now,
        **evidence,
    }
    return connection.execute(insert(deployment).values(row).returning(deployment)).one()


def _check_gate(
    connection: Connection, catalog: Catalog, before: Row[Any], version: Registered, gate: int, override: str | None
) -> None:
    mine = (gate_report.c.id == gate, gate_report.c.gallery_id == before.id)
    row = connection.execute(select(gate_report).where(*mine)).first()
    if row is None:
        raise InvalidArgument(f"gate: this gallery has no gate report {gate}", pointer="/gate")
    current = before.current_id and catalog.by_id(before.current_id).name
    if (row.version_id, row.report["current"]) != (version.id, current):
        compared = f"{row.report['version']!r} with {row.report['current']!r}"
        raise InvalidArgument(
            f"gate: report {gate} compared {compared}, this deploys {version.name!r} over {current!r}", pointer="/gate"
        )
    if row.verdict == "refuse" and not (override or "").strip():
        raise GateRefused(f"gate {gate} refused {version.name!r}: say in `override` why to deploy", pointer="/override")


def _history(connection: Connection, gallery_id: int) -> Sequence[Row[Any]]:
    mine = select(deployment).where(deployment.c.gallery_id == gallery_id)
    return connection.execute(mine.order_by(deployment.c.id)).all()


def _standing(history: Iterable[Row[Any]]) -> list[Row[Any]]:
    """The deployments a rollback goes back through, the current one last.

    The row behind one that was rolled back is the rollback: it stands in the place of what it returned to.
    """
    standing: list[Row[Any]] = []
    undone = False
    for row in history:
        if undone:
            del standing[-2:]
        standing.append(row)
        undone = row.state == "rolled_back"
    return standing
