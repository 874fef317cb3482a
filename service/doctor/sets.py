"""Evaluation sets that came as embeddings: of another length than their versions', or not finite."""

from __future__ import annotations

import numpy as np
from sqlalchemy import select

from service.doctor.findings import Context, Finding
from service.store.tables import evaluation, evaluation_embedding, gallery
from service.store.vector_codec import STORED


def check(context: Context) -> list[Finding]:
    """`evaluation_damaged`; nothing here can be mended."""
    damaged = Finding(
        "evaluation_damaged",
        "error",
        "evaluation sets hold embeddings that are not finite or of another length than their version's",
        "delete the set and add it again; no gate can be measured on it",
    )
    columns = (gallery.c.name, evaluation.c.id, evaluation.c.size, *evaluation_embedding.c)
    joined = evaluation_embedding.join(evaluation).join(gallery)
    with context.database.read() as connection:
        for row in connection.execute(select(*columns).select_from(joined)):
            card = context.registry.by_id(row.version_id).card
            if len(row.vectors) != row.size * card.dim * STORED.itemsize:
                damaged.add(f"{row.name}, evaluation {row.id}: {len(row.vectors)} bytes of {card.name}")
            elif not np.isfinite(np.frombuffer(row.vectors, STORED)).all():
                damaged.add(f"{row.name}, evaluation {row.id}: not finite, of {card.name}")
    return [damaged]
