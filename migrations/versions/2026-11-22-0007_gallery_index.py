"""How a gallery's vectors are indexed.

Revision: 0007
Follows: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null: the default. A plain column: a batch would rebuild the table, which others refer to.
    op.add_column("gallery", sa.Column("index_config", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("gallery", "index_config")
