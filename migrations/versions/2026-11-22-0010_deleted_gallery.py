"""Galleries that were deleted, and are freed block by block.

Revision: 0010
Follows: 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null: it is there. A plain column: a batch would rebuild the table, which others refer to.
    op.add_column("gallery", sa.Column("deleted", sa.Float(), nullable=True))
    op.create_index("ix_backfill_failure_item_id", "backfill_failure", ["item_id"])


def downgrade() -> None:
    # What is not freed yet comes back under a name by which it can be deleted again.
    op.execute("UPDATE gallery SET name = 'deleted-' || id WHERE deleted IS NOT NULL")
    op.drop_index("ix_backfill_failure_item_id", "backfill_failure")
    op.drop_column("gallery", "deleted")
