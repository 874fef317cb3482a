"""Several edges between two versions, each of its own kind, and where they come from.

Revision: 0002
Follows: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

VERSION = sa.table("version", sa.column("id", Id), sa.column("created", sa.Float))
BEFORE = sa.table(
    "edge",
    sa.column("new_id", Id),
    sa.column("old_id", Id),
    sa.column("kind", sa.String),
    sa.column("evidence", sa.JSON),
)
AFTER = sa.table(
    "edge",
    sa.column("id", Id),
    *(sa.column(column.name, column.type) for column in BEFORE.columns),
    sa.column("origin", sa.String),
    sa.column("made", sa.JSON),
    sa.column("files", sa.JSON),
    sa.column("created", sa.Float),
)


def upgrade() -> None:
    limit_lock_wait()
    # The key changes and no table refers to this one; there are few edges, so they are read, and written again.
    created = sa.select(VERSION.c.created).where(VERSION.c.id == BEFORE.c.new_id).scalar_subquery()
    kept = read(sa.select(BEFORE, created.label("created")).order_by(BEFORE.c.new_id, BEFORE.c.old_id))
    op.drop_table("edge")
    op.create_table(
        "edge",
        sa.Column("id", Id, nullable=False),
        sa.Column("new_id", Id, nullable=False),
        sa.Column("old_id", Id, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("origin", sa.String(length=16), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("made", sa.JSON(), nullable=False),
        sa.Column("folder", sa.String(length=256), nullable=True),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.CheckConstraint("origin in ('registered', 'added', 'fitted', 'claimed')", name=op.f("ck_edge_origin")),
        sa.ForeignKeyConstraint(["new_id"], ["version.id"], name="fk_edge_new_id"),
        sa.ForeignKeyConstraint(["old_id"], ["version.id"], name="fk_edge_old_id"),
        sa.PrimaryKeyConstraint("id", name="pk_edge"),
        sa.UniqueConstraint("new_id", "old_id", "kind", name="uq_edge_new_id_old_id_kind"),
        sqlite_autoincrement=True,
    )
    op.bulk_insert(AFTER, [{**row, "origin": "registered", "made": {}, "files": {}} for row in kept])


def downgrade() -> None:
    limit_lock_wait()
    # The release before knows only what came with a version, and one edge between two versions.
    registered = sa.select(*(AFTER.c[column.name] for column in BEFORE.columns)).where(AFTER.c.origin == "registered")
    pairs = {(row["new_id"], row["old_id"]): row for row in read(registered.order_by(AFTER.c.id.desc()))}
    op.drop_table("edge")
    op.create_table(
        "edge",
        sa.Column("new_id", Id, nullable=False),
        sa.Column("old_id", Id, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["new_id"], ["version.id"], name="fk_edge_new_id"),
        sa.ForeignKeyConstraint(["old_id"], ["version.id"], name="fk_edge_old_id"),
        sa.PrimaryKeyConstraint("new_id", "old_id", name="pk_edge"),
    )
    op.bulk_insert(BEFORE, list(pairs.values()))


def limit_lock_wait() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # Give up instead of queueing everyone behind a migration that waits for a lock.
        op.execute("SET LOCAL lock_timeout = '5s'")


def read(statement: sa.Select[*tuple[object, ...]]) -> list[dict[str, object]]:
    return [dict(row) for row in op.get_bind().execute(statement).mappings()]
