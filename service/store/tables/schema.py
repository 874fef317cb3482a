"""The metadata of all tables, and the type of their keys."""

from __future__ import annotations

from sqlalchemy import BigInteger, Integer, MetaData

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
