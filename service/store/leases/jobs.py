"""Leases of jobs that one process at a time does.

A lease only prevents duplicate work and is not a lock: the holder of an expired one may still work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Float, String, Table, or_

from service.store.sql.arrays import INSERT
from service.store.sql.database_clock import now
from service.store.tables import metadata

MAX_LEASES_AHEAD = 4
"""A lease that ends further ahead than this many leases was taken before the clock was set back."""

job_lease = Table(
    "job_lease",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("until", Float, nullable=False),
)


def is_expired(until: ColumnElement[float], seconds: float) -> ColumnElement[bool]:
    """Whether a lease of `seconds` that lasts `until` has expired."""
    return or_(until < now(), until > now() + MAX_LEASES_AHEAD * seconds)


def acquire_job(connection: Connection, name: str, owner: str, seconds: float) -> bool:
    """Take or extend the lease of a job; False: another process holds it."""
    return acquire_lease(connection, job_lease, {"name": name}, owner, seconds)


def acquire_lease(
    connection: Connection, table: Table, key: Mapping[str, Any], owner: str, seconds: float, **more: Any
) -> bool:
    """Take or extend the lease of a row with columns `owner` and `until`; False: another process holds it.

    A missing row is inserted, with `more` as its other columns.
    """
    lease = {"owner": owner, "until": now() + seconds}
    free = or_(table.c.owner == owner, is_expired(table.c.until, seconds))
    row = INSERT[connection.dialect.name](table).values(**key, **more, **lease)
    acquired = row.on_conflict_do_update(index_elements=list(key), set_=lease, where=free).returning(table.c.owner)
    return connection.execute(acquired).first() is not None
