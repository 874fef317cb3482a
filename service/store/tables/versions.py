"""Versions and the edges between them."""

from __future__ import annotations

from sqlalchemy import JSON, CheckConstraint, Column, Float, ForeignKey, String, Table, UniqueConstraint

from service.store.tables.schema import Id, metadata

version = Table(
    "version",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("card", JSON, nullable=False),
    Column("card_sha256", String(64), nullable=False),
    Column("created", Float, nullable=False),
    sqlite_autoincrement=True,
)

edge = Table(
    "edge",
    metadata,
    # A number is never reused and a row never changes, so processes find changes by comparing the existing numbers.
    Column("id", Id, primary_key=True),
    Column("new_id", Id, ForeignKey("version.id"), nullable=False),
    Column("old_id", Id, ForeignKey("version.id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("origin", String(16), nullable=False),
    # The content of edge.json.
    Column("evidence", JSON, nullable=False),
    # The evidence of its fit or verification.
    Column("made", JSON, nullable=False),
    # The folder of its files below edges/, and their sha256; null: they are in the version folder, or there are none.
    Column("folder", String(256)),
    Column("files", JSON, nullable=False),
    Column("created", Float, nullable=False),
    CheckConstraint("origin in ('registered', 'added', 'fitted', 'claimed')", name="origin"),
    UniqueConstraint("new_id", "old_id", "kind"),
    sqlite_autoincrement=True,
)
