"""The audit log."""

from __future__ import annotations

from sqlalchemy import JSON, Column, Float, String, Table

from service.store.tables.schema import Id, metadata

audit = Table(
    "audit",
    metadata,
    Column("id", Id, primary_key=True),
    Column("at", Float, nullable=False),
    Column("who", String(128), nullable=False),
    Column("action", String(32), nullable=False),
    Column("subject", String(256), nullable=False),
    Column("why", String(1024), nullable=False),
    Column("evidence", JSON, nullable=False),
    sqlite_autoincrement=True,
)
