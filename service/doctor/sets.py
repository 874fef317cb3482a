"""Check evaluation sets of embeddings: wrong length, or not finite."""

from __future__ import annotations

import numpy as np
from sqlalchemy import select

from service.doctor.findings import Context, Finding
from service.store.tables import evaluation, evaluation_embedding, gallery
from service.store.vectors.codec import STORED


def check(context: Context) -> list[Finding]:
    """`evaluation_damaged`, which cannot be fixed."""
    damaged = Finding(
        "evaluation_damaged",
        "error",
        "evaluation sets with embeddings that are not finite or have the wrong dimension",
        "delete the set and add it again; gates cannot use it",
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
