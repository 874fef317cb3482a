"""The time of the database's clock, by which processes compare times, since machines may differ by minutes."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

from sqlalchemy import Float
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class now(FunctionElement[float]):  # noqa: N801  (a function of SQL)
    """UTC seconds since the epoch when the statement runs."""

    type = Float()
    inherit_cache = True


@compiles(now, "postgresql")
def _in_postgresql(*_: Any, **__: Any) -> str:
    return "cast(extract(epoch from clock_timestamp()) as double precision)"


@compiles(now, "sqlite")
def _in_sqlite(*_: Any, **__: Any) -> str:
    return "epoch_seconds()"


def prepare_sqlite(connection: sqlite3.Connection) -> None:
    """Give a new connection the clock of this process, as all processes that share a SQLite file are on one machine."""
    connection.create_function("epoch_seconds", 0, _epoch_seconds)


def _epoch_seconds() -> float:
    return time.time()
