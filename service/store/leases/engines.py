"""Which galleries have vectors in external engines, and which process copies them there: one at a time.

A lease only keeps processes from doing the same work. One that expired while its holder was suspended does no harm,
since rows in an engine are numbered, and newer ones win.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Column, Connection, Float, String, Table, delete, select

from service.store.leases.jobs import acquire_lease
from service.store.rows import all_of
from service.store.sql.database_clock import now
from service.store.tables import Id, metadata

engine_lease = Table(
    "engine_lease",
    metadata,
    # No foreign key: the row outlives the gallery until its collections are removed from the engine.
    Column("gallery_id", Id, primary_key=True),
    Column("kind", String(16), primary_key=True),
    # The gallery's name in the engine.
    Column("name", String(128), nullable=False),
    # The process that copies rows there, and until when.
    Column("owner", String(64), nullable=False),
    Column("until", Float, nullable=False),
)


class EngineLeaseRow(NamedTuple):
    """A gallery in an engine; `name`: its name there, `over_seconds`: how long ago the lease expired."""

    gallery_id: int
    kind: str
    name: str
    owner: str
    over_seconds: float


def acquire_engine_lease(
    connection: Connection, gallery_id: int, kind: str, name: str, owner: str, seconds: float
) -> bool:
    """Take or extend the lease for writing a gallery's rows to an engine; False: another process holds it."""
    key = {"gallery_id": gallery_id, "kind": kind}
    return acquire_lease(connection, engine_lease, key, owner, seconds, name=name)


def engine_leases(connection: Connection) -> list[EngineLeaseRow]:
    """Every gallery that has rows in an engine, including rows that are yet to be removed."""
    columns = (*engine_lease.c[:-1], now() - engine_lease.c.until)
    return all_of(EngineLeaseRow, connection.execute(select(*columns).order_by(engine_lease.c.gallery_id)))


def delete_engine_lease(connection: Connection, gallery_id: int, kind: str) -> None:
    """Delete the row of a gallery whose rows are removed from the engine."""
    conditions = (engine_lease.c.gallery_id == gallery_id, engine_lease.c.kind == kind)
    connection.execute(delete(engine_lease).where(*conditions))
