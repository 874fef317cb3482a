"""An index in the order of the pages of a gallery's items.

Revision: 0009
Follows: 0007
"""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_item_gallery_id_id", "item", ["gallery_id", "id"])


def downgrade() -> None:
    op.drop_index("ix_item_gallery_id_id", "item")
