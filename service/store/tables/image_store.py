"""The image store that belongs to this database."""

from __future__ import annotations

from sqlalchemy import Column, String, Table

from service.store.tables.schema import metadata

image_store = Table(
    "image_store",
    metadata,
    # The content of the store's marker file (`service.store.image_store.blobs.MARKER`), drawn when the database is
    # made: one row.
    Column("marker", String(32), primary_key=True),
)
