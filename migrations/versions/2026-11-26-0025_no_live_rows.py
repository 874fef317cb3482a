"""How many rows refer to a file of vectors was stored and never read.

Revision: 0025
Follows: 0024
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # No release has this column: 0.1.0 has no files of vectors.
    op.drop_column("vector_file", "live")


def downgrade() -> None:
    op.add_column("vector_file", sa.Column("live", sa.Integer, nullable=False, server_default=sa.text("0")))
