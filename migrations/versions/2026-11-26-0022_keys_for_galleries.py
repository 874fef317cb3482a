"""Keys that open some galleries; those that are there open all.

Revision: 0022
Follows: 0021
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_key", sa.Column("galleries", sa.JSON))


def downgrade() -> None:
    # Or they would open everything.
    op.execute("DELETE FROM api_key WHERE galleries IS NOT NULL")
    op.drop_column("api_key", "galleries")
