"""Alembic's entry: runs on the connection that `service.store.database.migration.migrating` opened, in its transaction.

A new revision, from a checkout: with `migrating(url) as config`, call `alembic.command.revision(config, "what it does",
autogenerate=True)`, then write CHECK constraints by hand: Alembic neither generates nor compares them.
"""

from __future__ import annotations

from alembic import context

import service.store.api_keys
import service.store.leases.engines
import service.store.vectors.files  # noqa: F401 - they have tables of their own
from service.store.tables import metadata

connection = context.config.attributes["connection"]


def _is_compared(_object: object, name: str | None, *_more: object) -> bool:
    """PostgreSQL's partitions, and what they need, are written by hand: SQLAlchemy knows of one table."""
    return connection.dialect.name == "sqlite" or not (name or "").startswith(("embedding", "ix_item_gallery_id_id"))


context.configure(
    connection=connection,
    include_object=_is_compared,
    target_metadata=metadata,
    render_as_batch=True,
    compare_server_default=True,
)
with context.begin_transaction():
    context.run_migrations()
