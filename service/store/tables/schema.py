"""The metadata of all tables, and the types of keys and of JSON numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import JSON, BigInteger, Dialect, Integer, MetaData, TypeDecorator

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Id = BigInteger().with_variant(Integer, "sqlite")
"""64-bit key; on SQLite an INTEGER, so that it is the rowid (1.6 times faster to look up).

`sqlite_autoincrement`: a number is never assigned twice, even after the newest row was deleted, so that a replica,
worker or blob that still refers to the old row is not mistaken for one of the new.
"""


class ExactJson(TypeDecorator[Any]):
    """JSON for a column of values that may be numbers; `JSON` is exact for objects and lists.

    A column of type JSON has numeric affinity on SQLite: an integer beyond 64 bits would be stored as a float. SQLite
    leaves bytes as they are, and Python reads JSON from both.
    """

    impl = JSON
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any] | None:
        """The text of a value, on SQLite as bytes."""
        to_text = super().bind_processor(dialect)
        if to_text is None or dialect.name != "sqlite":
            return to_text
        return lambda value: to_text(value).encode()
