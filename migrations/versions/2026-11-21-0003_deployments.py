"""Deployments as a state machine; evaluation sets; calibrations of a gallery.

Revision: 0003
Follows: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

ENDED = "state in ('current', 'superseded', 'rolled_back')"
STATES = (
    "state in ('registered', 'verified', 'gated', 'shadow', 'canary', 'current', 'superseded', 'rolled_back',"
    " 'retired')"
)


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # Give up instead of queueing everyone behind a migration that waits for a lock.
        op.execute("SET LOCAL lock_timeout = '5s'")
    with op.batch_alter_table("deployment", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.drop_constraint(op.f("ck_deployment_state"), type_="check")
        batch.create_check_constraint(op.f("ck_deployment_state"), STATES)
        batch.add_column(sa.Column("since", sa.Float(), nullable=True))
        batch.add_column(sa.Column("undoes_id", Id, nullable=True))
        batch.add_column(sa.Column("settings", sa.JSON(), nullable=True))
        batch.add_column(sa.Column("to_free", sa.Integer(), nullable=True))
        batch.create_foreign_key("fk_deployment_undoes_id", "deployment", ["undoes_id"], ["id"])
    op.execute("UPDATE deployment SET since = created")
    # Until now the row behind one that was rolled back was its rollback.
    op.execute(
        "UPDATE deployment SET undoes_id = ("
        " SELECT undone.id FROM deployment AS undone WHERE undone.state = 'rolled_back' AND undone.id = ("
        "  SELECT max(earlier.id) FROM deployment AS earlier"
        "  WHERE earlier.gallery_id = deployment.gallery_id AND earlier.id < deployment.id))"
    )

    op.create_table(
        "deployment_transition",
        sa.Column("id", Id, nullable=False),
        sa.Column("deployment_id", Id, nullable=False),
        sa.Column("before", sa.String(length=16), nullable=True),
        sa.Column("after", sa.String(length=16), nullable=False),
        sa.Column("who", sa.String(length=128), nullable=False),
        sa.Column("why", sa.String(length=1024), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["deployment_id"], ["deployment.id"], name="fk_deployment_transition_deployment_id"),
        sa.PrimaryKeyConstraint("id", name="pk_deployment_transition"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_deployment_transition_deployment_id", "deployment_transition", ["deployment_id"])

    op.create_table(
        "trial_report",
        sa.Column("deployment_id", Id, nullable=False),
        sa.Column("phase", sa.String(length=8), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.CheckConstraint("phase in ('shadow', 'canary')", name=op.f("ck_trial_report_phase")),
        sa.ForeignKeyConstraint(["deployment_id"], ["deployment.id"], name="fk_trial_report_deployment_id"),
        sa.PrimaryKeyConstraint("deployment_id", "phase", name="pk_trial_report"),
    )

    op.create_table(
        "evaluation",
        sa.Column("id", Id, nullable=False),
        sa.Column("gallery_id", Id, nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("labelled", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.CheckConstraint("kind in ('images', 'embeddings')", name=op.f("ck_evaluation_kind")),
        sa.ForeignKeyConstraint(["gallery_id"], ["gallery.id"], name="fk_evaluation_gallery_id"),
        sa.PrimaryKeyConstraint("id", name="pk_evaluation"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_evaluation_gallery_id", "evaluation", ["gallery_id"])

    op.create_table(
        "evaluation_entry",
        sa.Column("evaluation_id", Id, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("label", sa.JSON(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("blob", sa.String(length=256), nullable=True),
        sa.ForeignKeyConstraint(["evaluation_id"], ["evaluation.id"], name="fk_evaluation_entry_evaluation_id"),
        sa.PrimaryKeyConstraint("evaluation_id", "number", name="pk_evaluation_entry"),
    )
    op.create_table(
        "evaluation_embedding",
        sa.Column("evaluation_id", Id, nullable=False),
        sa.Column("version_id", Id, nullable=False),
        sa.Column("vectors", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["evaluation_id"], ["evaluation.id"], name="fk_evaluation_embedding_evaluation_id"),
        sa.ForeignKeyConstraint(["version_id"], ["version.id"], name="fk_evaluation_embedding_version_id"),
        sa.PrimaryKeyConstraint("evaluation_id", "version_id", name="pk_evaluation_embedding"),
    )

    op.create_table(
        "calibration",
        sa.Column("id", Id, nullable=False),
        sa.Column("gallery_id", Id, nullable=False),
        sa.Column("gate_id", Id, nullable=False),
        sa.Column("query_id", Id, nullable=False),
        sa.Column("item_id", Id, nullable=False),
        sa.Column("origin", sa.String(length=16), nullable=False),
        sa.Column("route", sa.JSON(), nullable=False),
        sa.Column("map", sa.JSON(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.CheckConstraint("origin in ('encoded', 'transformed', 'supplied')", name=op.f("ck_calibration_origin")),
        sa.ForeignKeyConstraint(["gallery_id"], ["gallery.id"], name="fk_calibration_gallery_id"),
        sa.ForeignKeyConstraint(["gate_id"], ["gate_report.id"], name="fk_calibration_gate_id"),
        sa.ForeignKeyConstraint(["query_id"], ["version.id"], name="fk_calibration_query_id"),
        sa.ForeignKeyConstraint(["item_id"], ["version.id"], name="fk_calibration_item_id"),
        sa.PrimaryKeyConstraint("id", name="pk_calibration"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_calibration_gate_id", "calibration", ["gate_id"])


def downgrade() -> None:
    op.drop_table("calibration")
    op.drop_table("evaluation_embedding")
    op.drop_table("evaluation_entry")
    op.drop_table("evaluation")
    op.drop_table("trial_report")
    op.drop_table("deployment_transition")
    # What the older release has no word for was never current, or is over.
    op.execute("UPDATE deployment SET undoes_id = NULL")
    op.execute("DELETE FROM deployment WHERE since IS NULL")
    op.execute("UPDATE deployment SET state = 'superseded' WHERE state = 'retired'")
    with op.batch_alter_table("deployment", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.drop_constraint("fk_deployment_undoes_id", type_="foreignkey")
        batch.drop_constraint(op.f("ck_deployment_state"), type_="check")
        batch.create_check_constraint(op.f("ck_deployment_state"), ENDED)
        batch.drop_column("to_free")
        batch.drop_column("settings")
        batch.drop_column("undoes_id")
        batch.drop_column("since")
