"""Files of vectors in the store of images, and which process does a job of which there is one.

Revision: 0018
Follows: 0017
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "vector_file",
        sa.Column("id", ID, primary_key=True),
        sa.Column("gallery_id", ID, nullable=False),
        sa.Column("version_id", ID, nullable=False),
        sa.Column("key", sa.String(256), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("first_item", sa.BigInteger(), nullable=False),
        sa.Column("last_item", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("live", sa.Integer(), nullable=False),
        sa.Column("counted", sa.Float(), nullable=False),
        sa.Column("counted_seq", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state in ('writing', 'kept', 'dropped')", name=op.f("ck_vector_file_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_vector_file")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_vector_file_gallery_id"), "vector_file", ["gallery_id"])
    op.create_table(
        "job_lease",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_job_lease")),
    )


def downgrade() -> None:
    states = "select count(*) from vector_file where state in ('writing', 'kept')"
    if held := op.get_bind().execute(sa.text(states)).scalar_one():
        # Their places would be damaged vectors.
        raise RuntimeError(
            f"vectors lie in {held} files: run the service with REGRAFT_VECTORS=sql until it has brought them home"
        )
    op.drop_table("job_lease")
    op.drop_index(op.f("ix_vector_file_gallery_id"), table_name="vector_file")
    op.drop_table("vector_file")
