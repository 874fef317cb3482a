"""Deployments, the record of their steps, and the counts of trials."""

from __future__ import annotations

from sqlalchemy import JSON, CheckConstraint, Column, Float, ForeignKey, Index, Integer, String, Table

from service.store.tables.schema import Id, metadata

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
