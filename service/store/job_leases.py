"""Jobs that one process at a time does: which one, and until when.

A lease keeps processes from doing the same work, no more: one that ran out may have a holder that was only stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Float, String, Table, insert, or_, select, update

from service.store.sql_time import now
from service.store.tables import metadata

LONGEST_LEASES = 4
"""A lease that ends further ahead than so many was given before the clock was set back."""

job_lease = Table(
    "job_lease",
    metadata,
    # A job that one process at a time does; which one, and until when.
    Column("name", String(32), primary_key=True),
    Column("owner", String(64), nullable=False),
    Column("until", Float, nullable=False),
)


def is_over(until: ColumnElement[float], seconds: float) -> ColumnElement[bool]:
    """Whether a lease of so many seconds is nobody's any more."""
    return or_(until < now(), until > now() + LONGEST_LEASES * seconds)


def take_job(connection: Connection, name: str, owner: str, seconds: float) -> bool:
    """Be, or go on being, who does a job; False: another process is."""
    return take_row(connection, job_lease, {"name": name}, owner, seconds)


def take_row(
    connection: Connection, table: Table, key: Mapping[str, Any], owner: str, seconds: float, **more: Any
) -> bool:
    """Be, or go on being, the `owner` of a row until `seconds` from now; False: another process is.

    A row that is not there is made, with `more` as its other columns.
    """
    conditions = [table.c[name] == value for name, value in key.items()]
    free = or_(table.c.owner == owner, is_over(table.c.until, seconds))
    taken = connection.execute(update(table).where(*conditions, free).values(owner=owner, until=now() + seconds))
    if taken.rowcount:
        return True
    if connection.execute(select(table.c.owner).where(*conditions)).first() is not None:
        return False
    connection.execute(insert(table).values(**key, **more, owner=owner, until=now() + seconds))
    return True
