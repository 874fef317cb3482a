"""Start a backfill: what a request may ask (`BackfillRequest`), whether it is possible now, its row; see `start`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field
from sqlalchemy import Connection, insert, select

from index.errors import InvalidArgument, NoEncoder, NoRoute, RegraftError
from index.metadata.filter import parse_filter
from service.backfills.states import ACTIVE, BackfillState, Kind
from service.backfills.supplied import SUPPLIED
from service.backfills.sweeps import new_sweep_columns
from service.backfills.waiting import Scope, forward_from
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.schemas import MAX_CHUNK, Body, Name
from service.store.database.connections import Database
from service.store.galleries.gallery import gallery_named, gallery_row, take_seq
from service.store.rows import BackfillRow, first_of, one_of
from service.store.sql.database_clock import now
from service.store.tables import backfill

CHUNK_SIZE = {Kind.REENCODE: 64, Kind.TRANSFORM: 2048}
"""Items per chunk: enough that claim and commit cost little compared with computing."""
RATED_SECONDS = 0.5
"""Most seconds that a chunk takes at the backfill's rate; otherwise its first chunk would exceed the rate."""


class BackfillActive(RegraftError):
    """The gallery has a backfill that is running or paused."""

    status = 409
    code = "backfill_active"


class NotCurrent(RegraftError):
    """A backfill moves items to the gallery's current version only."""

    status = 409
    code = "not_current"


class BackfillRequest(Body):
    """What moves, in which order, and how fast; `service.http.backfills.backfills.BackfillIn` explains the fields."""

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


def start(connection: Connection, registry: Registry, gallery_id: int, request: BackfillRequest) -> BackfillRow:
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


def _chunk_size(request: BackfillRequest) -> int:
    if request.kind == SUPPLIED:
        return 1  # there are no chunks
    size = request.chunk_size or CHUNK_SIZE[Kind(request.kind)]
    return size if request.rate is None else max(1, min(size, int(request.rate * RATED_SECONDS)))


@contextmanager
def checked_scope(
    database: Database, registry: Registry, name: str, request: BackfillRequest
) -> Iterator[tuple[Connection, LoadedVersion, Scope]]:
    """Check a backfill without adding it; its target and scope, within one read transaction. Raises as `start`."""
    with database.read() as connection:
        gallery_id = gallery_named(connection, name).id
        target = _target(connection, registry, gallery_id, request.version)
        _check_free(connection, gallery_id)
        _check_possible(connection, registry, request, target)
        yield connection, target, Scope(gallery_id, request.kind, target.id, request.origin)


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


def _check_possible(
    connection: Connection, registry: Registry, request: BackfillRequest, target: LoadedVersion
) -> None:
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
