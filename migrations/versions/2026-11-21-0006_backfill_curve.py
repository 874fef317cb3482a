"""The curve of a backfill: what is measured while it runs, and each point of it.

Revision: 0006
Follows: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "backfill_curve",
        sa.Column("backfill_id", Id, nullable=False),
        sa.Column("asked", sa.JSON(), nullable=False),
        sa.Column("chosen", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("error", sa.String(length=1024)),
        sa.CheckConstraint("state in ('measuring', 'complete', 'stopped')", name=op.f("ck_backfill_curve_state")),
        sa.ForeignKeyConstraint(["backfill_id"], ["backfill.id"], name="fk_backfill_curve_backfill_id"),
        sa.PrimaryKeyConstraint("backfill_id", name="pk_backfill_curve"),
    )
    op.create_table(
        "backfill_point",
        sa.Column("backfill_id", Id, nullable=False),
        sa.Column("mark", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("claimed", sa.Float(), nullable=False),
        sa.Column("event", sa.Integer()),
        sa.Column("share", sa.Float()),
        sa.Column("moved", sa.Integer()),
        sa.Column("meanwhile", sa.Integer()),
        sa.Column("value", sa.Float()),
        sa.Column("low", sa.Float()),
        sa.Column("high", sa.Float()),
        sa.Column("queries", sa.Integer()),
        sa.Column("seq", sa.BigInteger()),
        sa.Column("at", sa.Float()),
        sa.ForeignKeyConstraint(["backfill_id"], ["backfill.id"], name="fk_backfill_point_backfill_id"),
        sa.PrimaryKeyConstraint("backfill_id", "mark", name="pk_backfill_point"),
    )


def downgrade() -> None:
    op.drop_table("backfill_point")
    op.drop_table("backfill_curve")
