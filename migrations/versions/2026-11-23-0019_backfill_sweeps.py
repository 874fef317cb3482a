"""How far the planning of a backfill is, so that it goes on in short transactions.

Revision: 0019
Follows: 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _limit()
    # Those there are were planned whole when they were started.
    op.add_column("backfill", sa.Column("sweep_seq", sa.BigInteger))
    op.add_column("backfill", sa.Column("sweep_at", sa.BigInteger, nullable=False, server_default=sa.text("0")))
    op.add_column("backfill", sa.Column("sweep_until", sa.Float))


def downgrade() -> None:
    _limit()
    # One that is half planned moves what is planned, and plans the rest when that is done.
    with op.batch_alter_table("backfill", table_kwargs={"sqlite_autoincrement": True}) as batch:
        for column in ("sweep_until", "sweep_at", "sweep_seq"):
            batch.drop_column(column)


def _limit() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # Give up instead of queueing everyone behind a migration that waits for a lock.
        op.execute("SET LOCAL lock_timeout = '5s'")
