"""Which embedding serves an item is a rule, and no column.

Revision: 0011
Follows: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # A batch rebuilds the table on SQLite; foreign keys are off meanwhile, so what refers to it stays.
    with op.batch_alter_table("item", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.drop_index(op.f("ix_item_gallery_id_active_id"))
        batch.drop_constraint(op.f("ck_item_live_has_version"), type_="check")
        batch.drop_constraint(op.f("fk_item_active_id"), type_="foreignkey")
        batch.drop_column("active_id")


def downgrade() -> None:
    # An item is active in the current version where it holds an embedding of that, else in the newest it holds; a
    # deployment moves it from there. One that holds none has no place in the older schema.
    op.add_column("item", sa.Column("active_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True))
    op.execute(
        "update item set active_id = coalesce("
        "(select e.version_id from embedding e join gallery g on g.current_id = e.version_id"
        " where e.item_id = item.id and g.id = item.gallery_id),"
        "(select max(e.version_id) from embedding e where e.item_id = item.id),"
        "(select g.current_id from gallery g where g.id = item.gallery_id))"
        " where not deleted"
    )
    with op.batch_alter_table("item", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.create_check_constraint(op.f("ck_item_live_has_version"), "deleted or active_id is not null")
        batch.create_foreign_key(op.f("fk_item_active_id"), "version", ["active_id"], ["id"])
        batch.create_index(op.f("ix_item_gallery_id_active_id"), ["gallery_id", "active_id"])
