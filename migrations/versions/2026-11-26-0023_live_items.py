"""An index of the items that are not deleted: pages of them do not read the rows of deleted ones.

Revision: 0023
Follows: 0022
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "ix_item_live",
        "item",
        ["gallery_id", "id"],
        sqlite_where=sa.text("deleted = 0"),
        postgresql_where=sa.text("NOT deleted"),
    )


def downgrade() -> None:
    op.drop_index("ix_item_live", "item")
