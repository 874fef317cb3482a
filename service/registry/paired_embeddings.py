"""Items that hold embeddings by two versions, for fitting edges and verifying claims; see `draw_pairs`.

Embeddings made by a forward edge are left out: they show what the edge does, not what the version's encoder does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import ColumnElement, Connection, Select, and_, false, select

from index.metadata.filter import value_at, value_text
from index.space import Vectors
from index.version import Origin
from service.registry.loaded_version import LoadedVersion
from service.store.galleries.embeddings import has_own_embedding
from service.store.galleries.random_items import RandomItems
from service.store.rows import all_of
from service.store.sql.arrays import BLOCK
from service.store.sql.partitioned import of_item
from service.store.tables import embedding, item
from service.store.vectors.codec import from_bytes, is_usable
from service.store.vectors.reader import with_vectors

OWN = (Origin.ENCODED.value, Origin.SUPPLIED.value)


@dataclass(frozen=True)
class PairedEmbeddings:
    """S items with both embeddings, `new` (S, dim) and `old` (S, dim), row by row."""

    names: Sequence[str]
    new: Vectors
    old: Vectors
    labels: Sequence[str] | None

    def with_more(self, other: PairedEmbeddings) -> PairedEmbeddings:
        """These and other pairs; both or neither have labels."""
        labels = None if self.labels is None or other.labels is None else [*self.labels, *other.labels]
        new, old = np.concatenate([self.new, other.new]), np.concatenate([self.old, other.old])
        return PairedEmbeddings([*self.names, *other.names], new, old, labels)


class PairRow(NamedTuple):
    """An item and its embeddings by both versions."""

    id: int
    external_id: str
    metadata: dict[str, Any]
    new: bytes
    old: bytes


def _pairs_statement(
    new: LoadedVersion, old: LoadedVersion, gallery_id: int | None, keys: Sequence[int]
) -> Select[Any]:
    """SELECT of items with their embeddings by both versions."""
    by_new, by_old = embedding.alias("by_new"), embedding.alias("by_old")
    columns = (item.c.id, item.c.external_id, item.c.metadata)
    statement = select(*columns, by_new.c.vector.label("new"), by_old.c.vector.label("old"))
    for table, version in ((by_new, new), (by_old, old)):
        statement = statement.join(table, of_item(table) & (table.c.version_id == version.id) & table.c.origin.in_(OWN))
    return statement.where(item.c.id.in_(keys), *_live(gallery_id))


def _live(gallery_id: int | None) -> tuple[ColumnElement[bool], ...]:
    """Conditions on live items of one gallery, or of all."""
    return (item.c.deleted == false(), *(() if gallery_id is None else (item.c.gallery_id == gallery_id,)))


def draw_pairs(
    connection: Connection,
    new: LoadedVersion,
    old: LoadedVersion,
    *,
    gallery_id: int | None,
    label: str | None,
    sample: int,
    seed: int,
) -> tuple[PairedEmbeddings, int]:
    """Up to `sample` items that hold both embeddings, and with `label` that metadata field, drawn by `seed`.

    Returns:
        The items, in the order drawn, and how many items hold both embeddings, with or without the field.
    """
    eligible = and_(*_live(gallery_id), has_own_embedding(new.id), has_own_embedding(old.id))
    items = RandomItems(connection, eligible, seed)
    rows: list[PairRow] = []
    for block in items.in_blocks(BLOCK):
        result = connection.execute(_pairs_statement(new, old, gallery_id, block))
        found = {row.id: row for row in with_vectors(connection, all_of(PairRow, result), "new", "old")}
        labelled = (found[i] for i in block if i in found and (label is None or _labelled(found[i], label)))
        rows += [row for row in labelled if is_usable(row.new, new.card.dim) and is_usable(row.old, old.card.dim)]
        if len(rows) >= sample:
            break
    rows = rows[:sample]
    by_new = from_bytes([row.new for row in rows], new.card.dim)
    by_old = from_bytes([row.old for row in rows], old.card.dim)
    labels = None if label is None else [label_text(row.metadata, label) for row in rows]
    return PairedEmbeddings([row.external_id for row in rows], by_new, by_old, labels), items.total


def label_text(metadata: Mapping[str, Any], label: str) -> str:
    """The existing metadata field `label` as text, by `value_text`."""
    return value_text(value_at(metadata, label))


def _labelled(row: PairRow, label: str) -> bool:
    return value_at(row.metadata, label) is not None
