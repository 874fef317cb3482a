"""The rows of deleted items are removed in time: up to which number of the feed, and which comes next since when.

Revision: 0024
Follows: 0023
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("purged_seq", "settling_seq"):
        op.add_column("gallery", sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0")))
    op.add_column("gallery", sa.Column("settling_since", sa.Float))
    op.create_index(
        "ix_item_deleted",
        "item",
        ["gallery_id", "seq"],
        sqlite_where=sa.text("deleted = 1"),
        postgresql_where=sa.text("deleted"),
    )


def downgrade() -> None:
    op.drop_index("ix_item_deleted", "item")
    for name in ("settling_since", "settling_seq", "purged_seq"):
        op.drop_column("gallery", name)
