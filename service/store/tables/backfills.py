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
    # Items per second over all workers; null: no limit.
    Column("rate", Float),
    # When the next chunk may be claimed; with a rate, each claim advances it by items / rate.
    Column("next_claim", Float),
    Column("total", Integer, nullable=False),
    Column("done", Integer, nullable=False, default=0),
    Column("skipped", Integer, nullable=False, default=0),
    Column("failed", Integer, nullable=False, default=0),
    Column("created", Float, nullable=False),
    Column("finished", Float),
    # Scope: the share of the items that qualify at the start, the most items, the origin of the active embedding.
    Column("share", Float),
    Column("item_limit", Integer),
    Column("origin", String(16)),
    Column("filter", JSON),
    Column("attempts", Integer, nullable=False, server_default=text("3")),
    # Grows with each visible change, and is the id of its event.
    Column("revision", Integer, nullable=False, server_default=text("0")),
    # Seconds that it ran before its last pause, and since when it runs (null: it does not).
    Column("active_seconds", Float, nullable=False, server_default=text("0")),
    Column("resumed", Float),
    # The sweep plans items as of this feed number (null: planning is complete); its progress is the last key, or, for
    # an order not by age, how many items were planned; and the end of the lease of the process that continues it.
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
    # The item's feed number when it failed; if it was written since, it is retried.
    Column("seq", BigInteger, nullable=False, server_default=text("0")),
    Column("attempts", Integer, nullable=False, server_default=text("1")),
    Column("final", Boolean, nullable=False, server_default=true()),
    # When it is retried; null: given up, or in a chunk already.
    Column("next_try", Float),
    # Deleting an item requires a search for rows that refer to it.
    Index(None, "item_id"),
)

backfill_curve = Table(
    "backfill_curve",
    metadata,
    Column("backfill_id", Id, ForeignKey("backfill.id"), primary_key=True),
    # The request, unchanged.
    Column("asked", JSON, nullable=False),
    # Number and blob of each query; the number is the key of an item, or the number of an entry in the evaluation set.
    Column("chosen", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    # Why the last attempt to measure a point failed; null: it did not.
    Column("error", String(1024)),
    CheckConstraint("state in ('measuring', 'complete', 'stopped')", name="state"),
)

backfill_point = Table(
    "backfill_point",
    metadata,
    Column("backfill_id", Id, ForeignKey("backfill.id"), primary_key=True),
    # Number of the curve's equal steps that were done; each mark is measured once.
    Column("mark", Integer, primary_key=True),
    # The process that measures it, and the time of its claim or last heartbeat.
    Column("owner", String(64), nullable=False),
    Column("claimed", Float, nullable=False),
    # The id of its event; this and the next columns are null while it is being measured.
    Column("event", Integer),
    Column("share", Float),
    Column("moved", Integer),
    # Items that were moved while it was measured.
    Column("meanwhile", Integer),
    Column("value", Float),
    Column("low", Float),
    Column("high", Float),
    Column("queries", Integer),
    # The gallery's feed number at the measurement.
    Column("seq", BigInteger),
    Column("at", Float),
)
