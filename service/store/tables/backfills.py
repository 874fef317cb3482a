"""Backfills, their chunks and failures, and their curves."""

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
    Integer,
    String,
    Table,
    text,
    true,
)

from service.store.tables.schema import Id, metadata

backfill = Table(
    "backfill",
    metadata,
    Column("id", Id, primary_key=True),
    Column("gallery_id", Id, ForeignKey("gallery.id"), nullable=False),
    Column("version_id", Id, ForeignKey("version.id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("item_order", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("chunk_size", Integer, nullable=False),
    # Items per second over all workers; null: as fast as it goes.
    Column("rate", Float),
    # With a rate: when the next chunk may be claimed; each claim moves it on by the time its items are worth.
    Column("next_claim", Float),
    Column("total", Integer, nullable=False),
    Column("done", Integer, nullable=False, default=0),
    Column("skipped", Integer, nullable=False, default=0),
    Column("failed", Integer, nullable=False, default=0),
    Column("created", Float, nullable=False),
    Column("finished", Float),
    # Scope: the share of what qualified at the start, the most items to be moved, the origin of the active embedding.
    Column("share", Float),
    Column("item_limit", Integer),
    Column("origin", String(16)),
    Column("filter", JSON),
    Column("attempts", Integer, nullable=False, server_default=text("3")),
    # Grows with each change that a user sees: the id of its event.
    Column("revision", Integer, nullable=False, server_default=text("0")),
    # Seconds it ran before it was last paused, and since when it runs; null while it does not.
    Column("active_seconds", Float, nullable=False, server_default=text("0")),
    Column("resumed", Float),
    # The sweep that plans it takes items as they were at this number of the feed (null: all is planned); the last key,
    # or how many were planned, where the order is not by age; until when a process has said that it goes on with it.
    Column("sweep_seq", BigInteger),
    Column("sweep_at", BigInteger, nullable=False, server_default=text("0")),
    Column("sweep_until", Float),
    CheckConstraint("kind in ('reencode', 'transform', 'supplied')", name="kind"),
    CheckConstraint(
        "item_order in ('random', 'newest', 'oldest', 'uncertainty', 'traffic', 'transformed')", name="item_order"
    ),
    CheckConstraint("state in ('running', 'paused', 'done', 'cancelled')", name="state"),
    Index(None, "gallery_id"),
    sqlite_autoincrement=True,
)

backfill_chunk = Table(
    "backfill_chunk",
    metadata,
    Column("id", Id, primary_key=True),
    Column("backfill_id", Id, ForeignKey("backfill.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("item_ids", JSON, nullable=False),
    Column("state", String(8), nullable=False),
    Column("lease_owner", String(128)),
    Column("lease_until", Float),
    CheckConstraint("state in ('todo', 'leased', 'done')", name="state"),
    Index(None, "backfill_id", "state", "number"),
    sqlite_autoincrement=True,
)

backfill_failure = Table(
    "backfill_failure",
    metadata,
    Column("backfill_id", Id, ForeignKey("backfill.id"), primary_key=True),
    Column("item_id", Id, ForeignKey("item.id"), primary_key=True),
    Column("reason", String(1024), nullable=False),
    Column("at", Float, nullable=False),
    Column("code", String(16), nullable=False, server_default=text("'refused'")),
    # The item as it was when it failed; written since, it is tried again.
    Column("seq", BigInteger, nullable=False, server_default=text("0")),
    Column("attempts", Integer, nullable=False, server_default=text("1")),
    Column("final", Boolean, nullable=False, server_default=true()),
    # When it is tried again; null: given up, or in a chunk already.
    Column("next_try", Float),
    # Who deletes an item looks for what refers to it.
    Index(None, "item_id"),
)

backfill_curve = Table(
    "backfill_curve",
    metadata,
    Column("backfill_id", Id, ForeignKey("backfill.id"), primary_key=True),
    # What was asked for, as it came.
    Column("asked", JSON, nullable=False),
    # Number and image of each query: an item's key, or its number in the evaluation set, which may be deleted since.
    Column("chosen", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    # Why the last attempt at a point failed; null: it did not.
    Column("error", String(1024)),
    CheckConstraint("state in ('measuring', 'complete', 'stopped')", name="state"),
)

backfill_point = Table(
    "backfill_point",
    metadata,
    Column("backfill_id", Id, ForeignKey("backfill.id"), primary_key=True),
    # How many of the curve's equal steps were done; each is measured once.
    Column("mark", Integer, primary_key=True),
    # The process that measures it, and since when.
    Column("owner", String(64), nullable=False),
    Column("claimed", Float, nullable=False),
    # The id of its event; null, as everything below: it is being measured.
    Column("event", Integer),
    Column("share", Float),
    Column("moved", Integer),
    # Items that were moved while it was measured.
    Column("meanwhile", Integer),
    Column("value", Float),
    Column("low", Float),
    Column("high", Float),
    Column("queries", Integer),
    # How far the gallery's feed had been followed.
    Column("seq", BigInteger),
    Column("at", Float),
)
