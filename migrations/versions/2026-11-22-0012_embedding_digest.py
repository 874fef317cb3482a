"""A digest beside each embedding, so that a start reads no vector that a sealed segment holds.

Revision: 0012
Follows: 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null: nobody noted it; the vector is read. A plain column: a batch would rebuild the largest table.
    op.add_column("embedding", sa.Column("digest", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column("embedding", "digest")
