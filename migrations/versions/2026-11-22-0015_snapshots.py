"""The snapshots that were made of a gallery: files that a start believes because a row names their hash.

Revision: 0015
Follows: 0014
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "gallery_snapshot",
        sa.Column("gallery_id", ID, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.ForeignKeyConstraint(["gallery_id"], ["gallery.id"], name=op.f("fk_gallery_snapshot_gallery_id")),
        sa.PrimaryKeyConstraint("gallery_id", "sha256", name=op.f("pk_gallery_snapshot")),
    )


def downgrade() -> None:
    op.drop_table("gallery_snapshot")
