"""The schema: SQL is the truth, everything else is derived (docs/design.md, section 4).

Plain `JSON`, `String` with a named CHECK instead of an enum type, and integer keys that are rowids on SQLite: nothing
here is refused by PostgreSQL. Vectors are little-endian float32 bytes. Times are UTC seconds since the epoch.
"""

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
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    text,
    true,
)

from index.item_id import MAX_ID

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

`sqlite_autoincrement`: a number is never given twice, also after the newest gallery was deleted, so a replica, worker
or blob that still speaks of the old one cannot be mistaken for the new.
"""

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
    # A number is never given twice and a row never changes: the numbers there are say what a process has to learn.
    Column("id", Id, primary_key=True),
    Column("new_id", Id, ForeignKey("version.id"), nullable=False),
    Column("old_id", Id, ForeignKey("version.id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("origin", String(16), nullable=False),
    # What edge.json holds.
    Column("evidence", JSON, nullable=False),
    # What it was fitted on, or by what it was verified.
    Column("made", JSON, nullable=False),
    # Where its files lie below edges/, and their sha256; null: in the version folder, or there are none.
    Column("folder", String(256)),
    Column("files", JSON, nullable=False),
    Column("created", Float, nullable=False),
    CheckConstraint("origin in ('registered', 'added', 'fitted', 'claimed')", name="origin"),
    UniqueConstraint("new_id", "old_id", "kind"),
    sqlite_autoincrement=True,
)

gallery = Table(
    "gallery",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("current_id", Id, ForeignKey("version.id")),
    Column("next_seq", BigInteger, nullable=False, default=1),
    Column("created", Float, nullable=False),
    # As `index.engines.base.IndexConfig`; null: the default.
    Column("index_config", JSON),
    # When it was deleted: nothing knows it any more, and its items are freed block by block; null: it is there.
    Column("deleted", Float),
    # Rows of items deleted up to this number of the feed may be gone; up to the other one, once a day has passed since.
    Column("purged_seq", BigInteger, nullable=False, server_default=text("0")),
    Column("settling_seq", BigInteger, nullable=False, server_default=text("0")),
    Column("settling_since", Float),
    sqlite_autoincrement=True,
)

gallery_snapshot = Table(
    "gallery_snapshot",
    metadata,
    Column("gallery_id", Id, ForeignKey("gallery.id"), primary_key=True),
    # What it is called in the gallery's folder: the sha256 of its manifest.
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
    # Where the stored image lies in the blob store; null: the item came as an embedding.
    Column("blob", String(256)),
    Column("seq", BigInteger, nullable=False),
    Column("deleted", Boolean, nullable=False, default=False),
    Column("created", Float, nullable=False),
    UniqueConstraint("gallery_id", "external_id"),
    Index(None, "gallery_id", "seq"),
    Index(None, "gallery_id", "id"),
    # Rows of deleted items stay for a while: a page of live ones does not read its way past them.
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
    # How unsure the forward transform that made it was, where its edge tells; higher is less sure.
    Column("uncertainty", Float),
    # As `index.engines.digest`: a start reads no vector that a sealed segment holds. Null: nobody noted it.
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

gate_report = Table(
    "gate_report",
    metadata,
    Column("id", Id, primary_key=True),
    Column("gallery_id", Id, ForeignKey("gallery.id"), nullable=False),
    Column("version_id", Id, ForeignKey("version.id"), nullable=False),
    Column("verdict", String(8), nullable=False),
    Column("report", JSON, nullable=False),
    Column("created", Float, nullable=False),
    CheckConstraint("verdict in ('pass', 'warn', 'refuse')", name="verdict"),
    sqlite_autoincrement=True,
)

deployment = Table(
    "deployment",
    metadata,
    Column("id", Id, primary_key=True),
    Column("gallery_id", Id, ForeignKey("gallery.id"), nullable=False),
    Column("version_id", Id, ForeignKey("version.id"), nullable=False),
    # What was current before; behind a deployment that was rolled back, the version rolled back from.
    Column("previous_id", Id, ForeignKey("version.id")),
    Column("gate_id", Id, ForeignKey("gate_report.id")),
    Column("state", String(16), nullable=False),
    # Items that were served by another of their embeddings from then on, one of a version that this one prefers.
    Column("activated", Integer, nullable=False),
    Column("reason", String(1024), nullable=False, default=""),
    Column("created", Float, nullable=False),
    # When it became current; null: it never was.
    Column("since", Float),
    # A rollback is a deployment of its own: the one it undid.
    Column("undoes_id", Id, ForeignKey("deployment.id")),
    # What its shadow or canary was asked to do.
    Column("settings", JSON),
    # Embeddings a retirement has still to free, or EMPTIED; null: none is under way.
    Column("to_free", Integer),
    CheckConstraint(
        "state in ('registered', 'verified', 'gated', 'shadow', 'canary', 'current', 'superseded', 'rolled_back',"
        " 'retired')",
        name="state",
    ),
    Index(None, "gallery_id"),
    sqlite_autoincrement=True,
)

deployment_transition = Table(
    "deployment_transition",
    metadata,
    Column("id", Id, primary_key=True),
    Column("deployment_id", Id, ForeignKey("deployment.id"), nullable=False),
    # Null: the deployment began with this transition.
    Column("before", String(16)),
    Column("after", String(16), nullable=False),
    Column("who", String(128), nullable=False),
    Column("why", String(1024), nullable=False),
    Column("evidence", JSON, nullable=False),
    Column("at", Float, nullable=False),
    Index(None, "deployment_id"),
    sqlite_autoincrement=True,
)

trial_report = Table(
    "trial_report",
    metadata,
    Column("deployment_id", Id, ForeignKey("deployment.id"), primary_key=True),
    Column("phase", String(8), primary_key=True),
    Column("report", JSON, nullable=False),
    CheckConstraint("phase in ('shadow', 'canary')", name="phase"),
)

evaluation = Table(
    "evaluation",
    metadata,
    Column("id", Id, primary_key=True),
    Column("gallery_id", Id, ForeignKey("gallery.id"), nullable=False),
    Column("name", String(128), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("size", Integer, nullable=False),
    Column("labelled", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("relevant", Integer, nullable=False, server_default=text("0")),
    CheckConstraint("kind in ('images', 'texts', 'embeddings')", name="kind"),
    Index(None, "gallery_id"),
    sqlite_autoincrement=True,
)

evaluation_entry = Table(
    "evaluation_entry",
    metadata,
    Column("evaluation_id", Id, ForeignKey("evaluation.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    # Any JSON value; the JSON null: no label.
    Column("label", JSON, nullable=False),
    Column("metadata", JSON, nullable=False),
    # Where the image or text lies in the blob store; null: the evaluation set came as embeddings.
    Column("blob", String(256)),
    # Ids of the items that are right for it; null: its label says what is.
    Column("relevant", JSON(none_as_null=True)),
)

evaluation_embedding = Table(
    "evaluation_embedding",
    metadata,
    Column("evaluation_id", Id, ForeignKey("evaluation.id"), primary_key=True),
    Column("version_id", Id, ForeignKey("version.id"), primary_key=True),
    # All of them, one after the other.
    Column("vectors", LargeBinary, nullable=False),
)

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

calibration = Table(
    "calibration",
    metadata,
    Column("id", Id, primary_key=True),
    Column("gallery_id", Id, ForeignKey("gallery.id"), nullable=False),
    # Used while a deployment that rests on this gate is current or tried out, so a rollback takes it back too.
    Column("gate_id", Id, ForeignKey("gate_report.id"), nullable=False),
    Column("query_id", Id, ForeignKey("version.id"), nullable=False),
    Column("item_id", Id, ForeignKey("version.id"), nullable=False),
    Column("origin", String(16), nullable=False),
    # The edges on the way, [[new, old, kind], ...]; a map serves this very route only.
    Column("route", JSON, nullable=False),
    Column("map", JSON, nullable=False),
    Column("evidence", JSON, nullable=False),
    CheckConstraint("origin in ('encoded', 'transformed', 'supplied')", name="origin"),
    Index(None, "gate_id"),
    sqlite_autoincrement=True,
)

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
