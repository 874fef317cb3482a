"""The state of one gallery in the database (`look`), to compare with a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import Connection, select

from service.store.database.connections import Database
from service.store.galleries.gallery import gallery_named
from service.store.tables import backfill, deployment, embedding, item, version
from service.store.vectors.reader import read_vectors


@dataclass
class Seen:
    """A live item: its metadata, and its embeddings as version -> (origin, vector)."""

    metadata: dict[str, Any]
    held: dict[str, tuple[str, np.ndarray]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sight:
    """One gallery at the feed number `seq`; `names`: key -> id of an item, `seqs`: feed numbers of the items."""

    seq: int
    current: str | None
    items: Mapping[str, Seen]
    names: Mapping[int, str]
    seqs: Sequence[int]
    deployments: Sequence[tuple[str, str]]
    backfills: Sequence[Any]


def look(database: Database, name: str) -> Sight:
    """Read everything in one snapshot."""
    with database.read() as connection:
        gallery = gallery_named(connection, name)
        versions = {row.id: row.name for row in connection.execute(select(version.c.id, version.c.name))}
        rows = connection.execute(select(item).where(item.c.gallery_id == gallery.id)).all()
        return Sight(
            seq=gallery.next_seq - 1,
            current=versions.get(gallery.current_id),
            items=_items(connection, versions, gallery.id, [row for row in rows if not row.deleted]),
            names={row.id: row.external_id for row in rows},
            seqs=[row.seq for row in rows],
            deployments=[(versions[row.version_id], row.state) for row in _of(connection, deployment, gallery.id)],
            backfills=_of(connection, backfill, gallery.id),
        )


def _items(
    connection: Connection, versions: Mapping[int, str], gallery_id: int, rows: Sequence[Any]
) -> dict[str, Seen]:
    seen = {row.id: Seen(row.metadata) for row in rows}
    held = connection.execute(select(embedding).join(item).where(item.c.gallery_id == gallery_id)).all()
    for row, vector in zip(held, read_vectors(connection, [row.vector for row in held]), strict=True):
        assert row.item_id in seen, "a deleted item holds an embedding"
        seen[row.item_id].held[versions[row.version_id]] = row.origin, np.frombuffer(vector, "<f4")
    return {row.external_id: seen[row.id] for row in rows}


def _of(connection: Connection, table: Any, gallery_id: int) -> Sequence[Any]:
    return connection.execute(select(table).where(table.c.gallery_id == gallery_id).order_by(table.c.id)).all()
