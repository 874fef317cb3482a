"""Evaluation sets of texts, and those whose entries name the items that are right for them.

Revision: 0016
Follows: 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

BEFORE, AFTER = "kind in ('images', 'embeddings')", "kind in ('images', 'texts', 'embeddings')"


def upgrade() -> None:
    _limit()
    with op.batch_alter_table("evaluation", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.add_column(sa.Column("relevant", sa.Integer, nullable=False, server_default=sa.text("0")))
        batch.drop_constraint(op.f("ck_evaluation_kind"), type_="check")
        batch.create_check_constraint(op.f("ck_evaluation_kind"), AFTER)
    op.add_column("evaluation_entry", sa.Column("relevant", sa.JSON, nullable=True))


def downgrade() -> None:
    _limit()
    # What the older release cannot measure on goes; the doctor finds the files of texts.
    gone = "select id from evaluation where kind = 'texts' or relevant > 0"
    op.execute(f"delete from evaluation_embedding where evaluation_id in ({gone})")  # noqa: S608 - no value of a user
    op.execute(f"delete from evaluation_entry where evaluation_id in ({gone})")  # noqa: S608
    op.execute("delete from evaluation where kind = 'texts' or relevant > 0")
    with op.batch_alter_table("evaluation_entry") as batch:
        batch.drop_column("relevant")
    with op.batch_alter_table("evaluation", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.drop_constraint(op.f("ck_evaluation_kind"), type_="check")
        batch.create_check_constraint(op.f("ck_evaluation_kind"), BEFORE)
        batch.drop_column("relevant")


def _limit() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # Give up instead of queueing everyone behind a migration that waits for a lock.
        op.execute("SET LOCAL lock_timeout = '5s'")
