"""Galleries, their items, and the embeddings of items."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    LargeBinary,
    String,
    Table,
    UniqueConstraint,
    text,
)

from index.item_id import MAX_ID
from service.store.tables.schema import Id, metadata

gallery = Table(
    "gallery",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("current_id", Id, ForeignKey("version.id")),
    Column("next_seq", BigInteger, nullable=False, default=1),
    Column("created", Float, nullable=False),
    # An `index.engines.config.IndexConfig`; null: the default.
    Column("index_config", JSON),
    # When it was deleted: it is invisible, and its items are freed block by block; null: it was not.
    Column("deleted", Float),
    # Tombstones up to `purged_seq` may be removed; those up to `settling_seq`, a day after `settling_since`.
    Column("purged_seq", BigInteger, nullable=False, server_default=text("0")),
    Column("settling_seq", BigInteger, nullable=False, server_default=text("0")),
    Column("settling_since", Float),
    sqlite_autoincrement=True,
)

gallery_snapshot = Table(
    "gallery_snapshot",
    metadata,
    Column("gallery_id", Id, ForeignKey("gallery.id"), primary_key=True),
    # Its name in the gallery's folder, which is the sha256 of its manifest.
    Column("sha256", String(64), primary_key=True),
    Column("created", Float, nullable=False),
)

item = Table(
    "item",
    metadata,
    Column("id", Id, primary_key=True),
    Column("gallery_id", Id, ForeignKey("gallery.id"), nullable=False),
    Column("external_id", String(MAX_ID), nullable=False),
    Column("metadata", JSON, nullable=False),
    # The key of its image or text in the image store; null: only embeddings were sent.
    Column("blob", String(256)),
    Column("seq", BigInteger, nullable=False),
    Column("deleted", Boolean, nullable=False, default=False),
    Column("created", Float, nullable=False),
    UniqueConstraint("gallery_id", "external_id"),
    Index(None, "gallery_id", "seq"),
    Index(None, "gallery_id", "id"),
    # Rows of deleted items stay for a while; with this index, a page of live items does not read them.
    Index("ix_item_live", "gallery_id", "id", sqlite_where=text("deleted = 0"), postgresql_where=text("NOT deleted")),
    Index("ix_item_deleted", "gallery_id", "seq", sqlite_where=text("deleted = 1"), postgresql_where=text("deleted")),
    sqlite_autoincrement=True,
)

embedding = Table(
    "embedding",
    metadata,
    Column("item_id", Id, ForeignKey("item.id"), primary_key=True),
    Column("version_id", Id, ForeignKey("version.id"), primary_key=True),
    Column("origin", String(16), nullable=False),
    Column("vector", LargeBinary, nullable=False),
    Column("side", LargeBinary),
    # The variance by the forward edge that made it, if it predicts one; higher is less certain.
    Column("uncertainty", Float),
    # By `index.engines.digest`, so that a start reads no vector that a sealed segment holds. Null: not stored.
    Column("digest", LargeBinary),
    CheckConstraint("origin in ('encoded', 'transformed', 'supplied')", name="origin"),
    Index(None, "version_id"),
)

item_traffic = Table(
    "item_traffic",
    metadata,
    Column("item_id", Id, ForeignKey("item.id"), primary_key=True),
    # How often queries have matched the item; counted in memory, so the last seconds before a crash are missing.
    Column("matches", BigInteger, nullable=False),
)
