"""Backfills: start, list, watch, pause, resume, cancel. `service.worker` does the work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field
from sqlalchemy import Connection, Row, insert, select, update

from index.errors import NoEncoder, NoRoute, RegraftError
from service.catalog import Catalog, Registered
from service.errors import NoCurrentVersion
from service.planner import ACTIVE, Kind, State, forward_from, plan
from service.repository import gallery_named, gallery_row, take_seq
from service.runtime import Service
from service.schemas import Body
from service.tables import backfill, backfill_failure, item

router = APIRouter(tags=["backfills"])

Number = Annotated[int, Path(ge=1, lt=1 << 63)]


class UnknownBackfill(RegraftError):
    """There is no backfill of this number."""

    status = 404
    code = "unknown_backfill"


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
    """What to move, and how fast: `rate` is items per second over all workers. `version` must be the current one."""

    version: str | None = None
    kind: Literal["reencode", "transform"] = "reencode"
    order: Literal["random", "newest", "oldest"] = "random"
    chunk_size: Annotated[int, Field(ge=1, le=4096)] = 64
    rate: Annotated[float | None, Field(ge=0.001)] = None


class BackfillOut(BaseModel):
    """A backfill: of `total` items so far, `done` moved, `skipped` changed meanwhile or needed no move, `failed`."""

    id: int
    gallery: str
    version: str
    kind: str
    order: str
    state: str
    total: int
    done: int
    skipped: int
    failed: int
    remaining: int
    rate: float | None
    created: float
    finished: float | None
    eta_seconds: float | None


class Backfills(BaseModel):
    """Every backfill of a gallery, oldest first."""

    backfills: list[BackfillOut]


class Failure(BaseModel):
    """An item that could not be moved, and why."""

    item: str
    reason: str
    at: float


class Failures(BaseModel):
    """The first failures of a backfill, and how many there are."""

    failures: list[Failure]
    failed: int


@router.post("/galleries/{name}/backfills", status_code=202)
def create(name: str, body: BackfillIn, response: Response, service: Service) -> BackfillOut:
    """Plan moving the gallery's items to its current version; workers start at once."""
    with service.database.write() as connection:
        row = start(connection, service.catalog, gallery_named(connection, name).id, body)
    response.headers["Location"] = f"/v1/backfills/{row.id}"
    return describe(service.catalog, name, row)


@router.get("/galleries/{name}/backfills")
def list_all(name: str, service: Service) -> Backfills:
    """Every backfill of a gallery, oldest first."""
    with service.database.read() as connection:
        mine = select(backfill).where(backfill.c.gallery_id == gallery_named(connection, name).id)
        rows = connection.execute(mine.order_by(backfill.c.id)).all()
    return Backfills(backfills=[describe(service.catalog, name, row) for row in rows])


@router.get("/backfills/{number}")
def show(number: Number, service: Service) -> BackfillOut:
    """State and progress of a backfill."""
    with service.database.read() as connection:
        row = _row(connection, number)
        name = _gallery_name(connection, row)
    return describe(service.catalog, name, row)


@router.get("/backfills/{number}/failures")
def failures(number: Number, service: Service, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000) -> Failures:
    """Items that could not be moved, with the reason."""
    with service.database.read() as connection:
        row = _row(connection, number)
        rows = _failures(connection, number, limit)
    found = [Failure(item=f.external_id, reason=f.reason, at=f.at) for f in rows]
    return Failures(failures=found, failed=row.failed)


@router.post("/backfills/{number}/pause")
def pause(number: Number, service: Service) -> BackfillOut:
    """Let no chunk be claimed or committed until it is resumed."""
    return _turn(service, number, State.RUNNING, State.PAUSED)


@router.post("/backfills/{number}/resume")
def resume(number: Number, service: Service) -> BackfillOut:
    """Go on with a paused backfill."""
    return _turn(service, number, State.PAUSED, State.RUNNING)


@router.post("/backfills/{number}/cancel")
def cancel(number: Number, service: Service) -> BackfillOut:
    """End a backfill; what it moved stays moved."""
    with service.database.write() as connection:
        active = update(backfill).where(backfill.c.id == number, backfill.c.state.in_(ACTIVE))
        connection.execute(active.values(state=State.CANCELLED, finished=time.time()))
        row = _row(connection, number)
        if row.state != State.CANCELLED:
            raise BackfillEnded(f"backfill {number} is {row.state}")
        name = _gallery_name(connection, row)
    return describe(service.catalog, name, row)


def start(connection: Connection, catalog: Catalog, gallery_id: int, asked: BackfillIn) -> Row[Any]:
    """Add a backfill with its chunks and return its row; one without any item to move is done at once.

    Raises:
        NoCurrentVersion, NotCurrent: the target is not the gallery's current version.
        BackfillActive: another one is running or paused.
        NoEncoder: `reencode` to a version that takes embeddings only.
        NoRoute: `transform` to a version without any item edge.
    """
    take_seq(connection, gallery_id, 0)
    target = _target(connection, catalog, gallery_id, asked.version)
    _check_free(connection, gallery_id)
    _check_possible(connection, Kind(asked.kind), target)
    now = time.time()
    values = {
        "gallery_id": gallery_id,
        "version_id": target.id,
        "kind": asked.kind,
        "item_order": asked.order,
        "state": State.RUNNING,
        "chunk_size": asked.chunk_size,
        "rate": asked.rate,
        "next_claim": now,
        "total": 0,
        "created": now,
    }
    row = connection.execute(insert(backfill).values(values).returning(backfill)).one()
    if not plan(connection, row):
        connection.execute(update(backfill).where(backfill.c.id == row.id).values(state=State.DONE, finished=now))
    return _row(connection, row.id)


def describe(catalog: Catalog, gallery_name: str, row: Row[Any]) -> BackfillOut:
    """What a user sees of a backfill."""
    return BackfillOut(
        id=row.id,
        gallery=gallery_name,
        version=catalog.by_id(row.version_id).name,
        kind=row.kind,
        order=row.item_order,
        state=row.state,
        total=row.total,
        done=row.done,
        skipped=row.skipped,
        failed=row.failed,
        remaining=_remaining(row),
        rate=row.rate,
        created=row.created,
        finished=row.finished,
        eta_seconds=_eta(row),
    )


def _target(connection: Connection, catalog: Catalog, gallery_id: int, asked: str | None) -> Registered:
    row = gallery_row(connection, gallery_id)
    assert row is not None
    if row.current_id is None:
        raise NoCurrentVersion(f"gallery {row.name!r} has no current version: deploy one first")
    current = catalog.by_id(row.current_id)
    if asked is not None and catalog.named(asked) is not current:
        raise NotCurrent(f"version {asked!r} is not current, {current.name!r} is: deploy it first", pointer="/version")
    return current


def _check_free(connection: Connection, gallery_id: int) -> None:
    active = select(backfill).where(backfill.c.gallery_id == gallery_id, backfill.c.state.in_(ACTIVE))
    if row := connection.execute(active).first():
        raise BackfillActive(f"backfill {row.id} of this gallery is {row.state}: wait for it or cancel it")


def _check_possible(connection: Connection, kind: Kind, target: Registered) -> None:
    if kind is Kind.REENCODE and not target.card.encoder:
        raise NoEncoder(f"version {target.name!r} has no encoder: reencode is not possible", pointer="/kind")
    if kind is Kind.TRANSFORM and connection.execute(forward_from(target.id)).first() is None:
        raise NoRoute(f"no forward edge leads to version {target.name!r}: transform is not possible", pointer="/kind")


def _turn(service: Service, number: int, before: State, after: State) -> BackfillOut:
    with service.database.write() as connection:
        turned = update(backfill).where(backfill.c.id == number, backfill.c.state == before)
        connection.execute(turned.values(state=after))
        row = _row(connection, number)
        if row.state != after:
            raise BackfillEnded(f"backfill {number} is {row.state}")
        name = _gallery_name(connection, row)
    return describe(service.catalog, name, row)


def _row(connection: Connection, number: int) -> Row[Any]:
    row = connection.execute(select(backfill).where(backfill.c.id == number)).first()
    if row is None:
        raise UnknownBackfill(f"there is no backfill {number}")
    return row


def _gallery_name(connection: Connection, row: Row[Any]) -> str:
    found = gallery_row(connection, row.gallery_id)
    assert found is not None
    return str(found.name)


def _failures(connection: Connection, number: int, limit: int) -> Sequence[Row[str, str, float]]:
    columns = (item.c.external_id, backfill_failure.c.reason, backfill_failure.c.at)
    statement = select(*columns).join(item, item.c.id == backfill_failure.c.item_id)
    mine = statement.where(backfill_failure.c.backfill_id == number)
    return connection.execute(mine.order_by(backfill_failure.c.item_id).limit(limit)).all()


def _remaining(row: Row[Any]) -> int:
    return int(row.total - row.done - row.skipped - row.failed)


def _eta(row: Row[Any]) -> float | None:
    """Seconds left at the mean speed since the start; None while nobody can know."""
    processed = row.total - _remaining(row)
    if row.state != State.RUNNING or not processed:
        return None
    return float(_remaining(row) * (time.time() - row.created) / processed)
