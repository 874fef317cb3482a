"""What the marker file of the image store holds, so that a database does not take the store of another one for its own.

Revision: 0026
Follows: 0025
"""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    table = op.create_table(
        "image_store",
        sa.Column("marker", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("marker", name="pk_image_store"),
    )
    op.bulk_insert(table, [{"marker": uuid.uuid4().hex}])


def downgrade() -> None:
    op.drop_table("image_store")
