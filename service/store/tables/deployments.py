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
    # The version that was current before; for a rollback, the version rolled back from.
    Column("previous_id", Id, ForeignKey("version.id")),
    Column("gate_id", Id, ForeignKey("gate_report.id")),
    Column("state", String(16), nullable=False),
    # How many items another of their embeddings served after it became current.
    Column("activated", Integer, nullable=False),
    Column("reason", String(1024), nullable=False, default=""),
    Column("created", Float, nullable=False),
    # When it became current; null: it never did.
    Column("since", Float),
    # For a rollback, which is a separate deployment: the deployment that it undid.
    Column("undoes_id", Id, ForeignKey("deployment.id")),
    # The settings of its shadow or canary.
    Column("settings", JSON),
    # Embeddings that its retirement has yet to free, or EMPTIED; null: none.
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
