"""Backfills that wait for embeddings from outside.

Revision: 0013
Follows: 0012
"""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

BEFORE, AFTER = "kind in ('reencode', 'transform')", "kind in ('reencode', 'transform', 'supplied')"


def upgrade() -> None:
    _check(AFTER)


def downgrade() -> None:
    # What such a one waited for stays; as a backfill of another kind it is over.
    op.execute("update backfill set state = 'cancelled' where kind = 'supplied' and state in ('running', 'paused')")
    op.execute("update backfill set kind = 'reencode' where kind = 'supplied'")
    _check(BEFORE)


def _check(kinds: str) -> None:
    if op.get_bind().dialect.name == "postgresql":
        # Give up instead of queueing everyone behind a migration that waits for a lock.
        op.execute("SET LOCAL lock_timeout = '5s'")
    with op.batch_alter_table("backfill", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.drop_constraint(op.f("ck_backfill_kind"), type_="check")
        batch.create_check_constraint(op.f("ck_backfill_kind"), kinds)
