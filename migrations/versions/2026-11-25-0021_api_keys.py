"""Keys by name, each with a scope, beside the one of the settings.

Revision: 0021
Follows: 0020
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_key",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(8), nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.CheckConstraint("scope in ('query', 'ingest', 'admin')", name="scope"),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_api_key")),
        sa.UniqueConstraint("sha256", name=op.f("uq_api_key_sha256")),
    )


def downgrade() -> None:
    op.drop_table("api_key")
