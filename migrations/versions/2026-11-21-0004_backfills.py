"""Backfills: scope, orders, retries, traffic, and what their events and time left are computed from.

Revision: 0004
Follows: 0003
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

ORDERS = "item_order in ('random', 'newest', 'oldest', 'uncertainty', 'traffic', 'transformed')"
ORDERS_BEFORE = "item_order in ('random', 'newest', 'oldest')"


def backfill_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("share", sa.Float()),
        sa.Column("item_limit", sa.Integer()),
        sa.Column("origin", sa.String(length=16)),
        sa.Column("filter", sa.JSON()),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("3")),
        sa.Column("revision", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("active_seconds", sa.Float(), nullable=False, server_default=sa.text("0")),
        sa.Column("resumed", sa.Float()),
    ]


def failure_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("code", sa.String(length=16), nullable=False, server_default=sa.text("'refused'")),
        sa.Column("seq", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("1")),
        sa.Column("final", sa.Boolean(), nullable=False, server_default=sa.true()),
        sa.Column("next_try", sa.Float()),
    ]


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # Give up instead of queueing everyone behind a migration that waits for a lock.
        op.execute("SET LOCAL lock_timeout = '5s'")
    with op.batch_alter_table("backfill", table_kwargs={"sqlite_autoincrement": True}) as batch:
        for column in backfill_columns():
            batch.add_column(column)
        batch.drop_constraint(op.f("ck_backfill_item_order"), type_="check")
        batch.create_check_constraint(op.f("ck_backfill_item_order"), ORDERS)
    for column in failure_columns():
        op.add_column("backfill_failure", column)
    op.add_column("embedding", sa.Column("uncertainty", sa.Float()))
    op.create_table(
        "item_traffic",
        sa.Column("item_id", Id, nullable=False),
        sa.Column("matches", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["item_id"], ["item.id"], name="fk_item_traffic_item_id"),
        sa.PrimaryKeyConstraint("item_id", name="pk_item_traffic"),
    )
    # A backfill that was running goes on; its time left is counted from the start, as before.
    op.execute("update backfill set resumed = created where state = 'running'")


def downgrade() -> None:
    op.drop_table("item_traffic")
    op.drop_column("embedding", "uncertainty")
    for column in reversed(failure_columns()):
        op.drop_column("backfill_failure", column.name)
    op.execute("update backfill set item_order = 'random' where item_order not in ('random', 'newest', 'oldest')")
    with op.batch_alter_table("backfill", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.drop_constraint(op.f("ck_backfill_item_order"), type_="check")
        batch.create_check_constraint(op.f("ck_backfill_item_order"), ORDERS_BEFORE)
        for column in reversed(backfill_columns()):
            batch.drop_column(column.name)
