"""PostgreSQL notifies of galleries, versions and edges that changed, in the transaction that changes them.

Revision: 0014
Follows: 0013
"""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

EVENTS = {"gallery": "insert or update or delete", "version": "insert or delete", "edge": "insert or delete"}


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return  # SQLite's counter of commits is asked, at next to no cost
    op.execute(
        "create function regraft_notify() returns trigger language plpgsql as $$ begin "
        "perform pg_notify('regraft', tg_table_name || ' ' || case tg_op when 'DELETE' then old.id else new.id end); "
        "return null; end $$"
    )
    for table, events in EVENTS.items():
        op.execute(
            f"create trigger regraft_notify after {events} on {table} for each row execute function regraft_notify()"
        )


def downgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for table in EVENTS:
        op.execute(f"drop trigger regraft_notify on {table}")
    op.execute("drop function regraft_notify()")
