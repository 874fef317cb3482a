"""A data folder to damage, and what the doctor says of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete, select, update

from service.doctor.examination import Doctor
from service.doctor.findings import Finding
from service.settings import Settings
from service.store.blob_references import open_blobs
from service.store.database.connections import Database
from service.store.offloading.offloader import Offloader
from service.store.tables import embedding, gallery, item
from service.store.vectors.codec import to_bytes
from staging.states.settling import settled_at_once


class Ward:
    """A data folder of six items, encoded by v1 and four of them by v2 too, and what the doctor says of it."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings, self.database = settings, database
        ((self.gallery,),) = self.rows(select(gallery.c.name))
        self.ids = dict(self.rows(select(item.c.external_id, item.c.id)))

    def rows(self, statement: Any) -> list[Any]:
        with self.database.lookup() as connection:
            return [tuple(row) for row in connection.execute(statement)]

    def examine(self, fix: bool = False) -> dict[str, Finding]:
        return {finding.code: finding for finding in Doctor(self.settings, self.database).examine(fix=fix)}

    def offload(self, patch: pytest.MonkeyPatch) -> list[str]:
        """Move all vectors into files; the keys of these, in order."""
        settled_at_once(patch)
        blobs = open_blobs(self.database, self.settings.blobs_url)
        Offloader(self.database, blobs, "objects").look()
        return sorted(key for key, _ in blobs.all_vector_files())

    def damage(self, name: str, version_id: int, vector: np.ndarray | None) -> None:
        mine = (embedding.c.item_id == self.ids[name], embedding.c.version_id == version_id)
        with self.database.write() as connection:
            if vector is None:
                connection.execute(delete(embedding).where(*mine))
            else:
                connection.execute(update(embedding).where(*mine).values(vector=to_bytes(vector.astype(np.float32))))
