"""The first schema.

Revision: 0001
Follows: nothing
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # Give up instead of queueing everyone behind a migration that waits for a lock.
        op.execute("SET LOCAL lock_timeout = '5s'")
    op.create_table(
        "version",
        sa.Column("id", Id, nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("card", sa.JSON(), nullable=False),
        sa.Column("card_sha256", sa.String(length=64), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_version"),
        sa.UniqueConstraint("name", name="uq_version_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "edge",
        sa.Column("new_id", Id, nullable=False),
        sa.Column("old_id", Id, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["new_id"], ["version.id"], name="fk_edge_new_id"),
        sa.ForeignKeyConstraint(["old_id"], ["version.id"], name="fk_edge_old_id"),
        sa.PrimaryKeyConstraint("new_id", "old_id", name="pk_edge"),
    )
    op.create_table(
        "gallery",
        sa.Column("id", Id, nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("current_id", Id, nullable=True),
        sa.Column("next_seq", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["current_id"], ["version.id"], name="fk_gallery_current_id"),
        sa.PrimaryKeyConstraint("id", name="pk_gallery"),
        sa.UniqueConstraint("name", name="uq_gallery_name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "backfill",
        sa.Column("id", Id, nullable=False),
        sa.Column("gallery_id", Id, nullable=False),
        sa.Column("version_id", Id, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("item_order", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("chunk_size", sa.Integer(), nullable=False),
        sa.Column("rate", sa.Float(), nullable=True),
        sa.Column("next_claim", sa.Float(), nullable=True),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("done", sa.Integer(), nullable=False),
        sa.Column("skipped", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("finished", sa.Float(), nullable=True),
        sa.CheckConstraint("item_order in ('random', 'newest', 'oldest')", name=op.f("ck_backfill_item_order")),
        sa.CheckConstraint("kind in ('reencode', 'transform')", name=op.f("ck_backfill_kind")),
        sa.CheckConstraint("state in ('running', 'paused', 'done', 'cancelled')", name=op.f("ck_backfill_state")),
        sa.ForeignKeyConstraint(["gallery_id"], ["gallery.id"], name="fk_backfill_gallery_id"),
        sa.ForeignKeyConstraint(["version_id"], ["version.id"], name="fk_backfill_version_id"),
        sa.PrimaryKeyConstraint("id", name="pk_backfill"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_backfill_gallery_id", "backfill", ["gallery_id"])

    op.create_table(
        "gate_report",
        sa.Column("id", Id, nullable=False),
        sa.Column("gallery_id", Id, nullable=False),
        sa.Column("version_id", Id, nullable=False),
        sa.Column("verdict", sa.String(length=8), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.CheckConstraint("verdict in ('pass', 'warn', 'refuse')", name=op.f("ck_gate_report_verdict")),
        sa.ForeignKeyConstraint(["gallery_id"], ["gallery.id"], name="fk_gate_report_gallery_id"),
        sa.ForeignKeyConstraint(["version_id"], ["version.id"], name="fk_gate_report_version_id"),
        sa.PrimaryKeyConstraint("id", name="pk_gate_report"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "item",
        sa.Column("id", Id, nullable=False),
        sa.Column("gallery_id", Id, nullable=False),
        sa.Column("external_id", sa.String(length=256), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("blob", sa.String(length=256), nullable=True),
        sa.Column("active_id", Id, nullable=True),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("deleted", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.CheckConstraint("deleted or active_id is not null", name=op.f("ck_item_live_has_version")),
        sa.ForeignKeyConstraint(["active_id"], ["version.id"], name="fk_item_active_id"),
        sa.ForeignKeyConstraint(["gallery_id"], ["gallery.id"], name="fk_item_gallery_id"),
        sa.PrimaryKeyConstraint("id", name="pk_item"),
        sa.UniqueConstraint("gallery_id", "external_id", name="uq_item_gallery_id_external_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_item_gallery_id_active_id", "item", ["gallery_id", "active_id"])
    op.create_index("ix_item_gallery_id_seq", "item", ["gallery_id", "seq"])

    op.create_table(
        "backfill_chunk",
        sa.Column("id", Id, nullable=False),
        sa.Column("backfill_id", Id, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("item_ids", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.CheckConstraint("state in ('todo', 'leased', 'done')", name=op.f("ck_backfill_chunk_state")),
        sa.ForeignKeyConstraint(["backfill_id"], ["backfill.id"], name="fk_backfill_chunk_backfill_id"),
        sa.PrimaryKeyConstraint("id", name="pk_backfill_chunk"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_backfill_chunk_backfill_id_state_number", "backfill_chunk", ["backfill_id", "state", "number"])

    op.create_table(
        "backfill_failure",
        sa.Column("backfill_id", Id, nullable=False),
        sa.Column("item_id", Id, nullable=False),
        sa.Column("reason", sa.String(length=1024), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["backfill_id"], ["backfill.id"], name="fk_backfill_failure_backfill_id"),
        sa.ForeignKeyConstraint(["item_id"], ["item.id"], name="fk_backfill_failure_item_id"),
        sa.PrimaryKeyConstraint("backfill_id", "item_id", name="pk_backfill_failure"),
    )
    op.create_table(
        "deployment",
        sa.Column("id", Id, nullable=False),
        sa.Column("gallery_id", Id, nullable=False),
        sa.Column("version_id", Id, nullable=False),
        sa.Column("previous_id", Id, nullable=True),
        sa.Column("gate_id", Id, nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("activated", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(length=1024), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.CheckConstraint("state in ('current', 'superseded', 'rolled_back')", name=op.f("ck_deployment_state")),
        sa.ForeignKeyConstraint(["gallery_id"], ["gallery.id"], name="fk_deployment_gallery_id"),
        sa.ForeignKeyConstraint(["gate_id"], ["gate_report.id"], name="fk_deployment_gate_id"),
        sa.ForeignKeyConstraint(["previous_id"], ["version.id"], name="fk_deployment_previous_id"),
        sa.ForeignKeyConstraint(["version_id"], ["version.id"], name="fk_deployment_version_id"),
        sa.PrimaryKeyConstraint("id", name="pk_deployment"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_deployment_gallery_id", "deployment", ["gallery_id"])

    op.create_table(
        "embedding",
        sa.Column("item_id", Id, nullable=False),
        sa.Column("version_id", Id, nullable=False),
        sa.Column("origin", sa.String(length=16), nullable=False),
        sa.Column("vector", sa.LargeBinary(), nullable=False),
        sa.Column("side", sa.LargeBinary(), nullable=True),
        sa.CheckConstraint("origin in ('encoded', 'transformed', 'supplied')", name=op.f("ck_embedding_origin")),
        sa.ForeignKeyConstraint(["item_id"], ["item.id"], name="fk_embedding_item_id"),
        sa.ForeignKeyConstraint(["version_id"], ["version.id"], name="fk_embedding_version_id"),
        sa.PrimaryKeyConstraint("item_id", "version_id", name="pk_embedding"),
    )
    op.create_index("ix_embedding_version_id", "embedding", ["version_id"])


def downgrade() -> None:
    # An index goes with its table.
    op.drop_table("embedding")
    op.drop_table("deployment")
    op.drop_table("backfill_failure")
    op.drop_table("backfill_chunk")
    op.drop_table("item")
    op.drop_table("gate_report")
    op.drop_table("backfill")
    op.drop_table("gallery")
    op.drop_table("edge")
    op.drop_table("version")
