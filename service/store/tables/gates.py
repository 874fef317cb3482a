"""Evaluation sets, gate reports, and the calibrations that gates fit."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    text,
)

from service.store.tables.schema import ExactJson, Id, metadata

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
    Column("label", ExactJson, nullable=False),
    Column("metadata", JSON, nullable=False),
    # The key of its image or text in the image store; null: the set has embeddings.
    Column("blob", String(256)),
    # Ids of the items that are relevant to it; null: its label decides.
    Column("relevant", JSON(none_as_null=True)),
)

evaluation_embedding = Table(
    "evaluation_embedding",
    metadata,
    Column("evaluation_id", Id, ForeignKey("evaluation.id"), primary_key=True),
    Column("version_id", Id, ForeignKey("version.id"), primary_key=True),
    # The concatenated embeddings of all entries.
    Column("vectors", LargeBinary, nullable=False),
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

calibration = Table(
    "calibration",
    metadata,
    Column("id", Id, primary_key=True),
    Column("gallery_id", Id, ForeignKey("gallery.id"), nullable=False),
    # Used while a deployment that rests on this gate is current or in a trial, so that a rollback also undoes it.
    Column("gate_id", Id, ForeignKey("gate_report.id"), nullable=False),
    Column("query_id", Id, ForeignKey("version.id"), nullable=False),
    Column("item_id", Id, ForeignKey("version.id"), nullable=False),
    Column("origin", String(16), nullable=False),
    # The edges of the route, [[new, old, kind], ...]; a map applies only to this route.
    Column("route", JSON, nullable=False),
    Column("map", JSON, nullable=False),
    Column("evidence", JSON, nullable=False),
    CheckConstraint("origin in ('encoded', 'transformed', 'supplied')", name="origin"),
    Index(None, "gate_id"),
    sqlite_autoincrement=True,
)
