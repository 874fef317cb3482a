"""Pairs for a fit from stored images and texts, embedded by the version whose embedding is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from sqlalchemy import Connection, and_, false, or_, select

from index.encoders.decoding import Decoder
from index.encoders.encoder import BATCH
from index.metadata.filter import value_at
from index.space import Vectors
from service.backfills.waiting import embeddable
from service.registry.loaded_version import LoadedVersion
from service.registry.paired_embeddings import OWN, PairedEmbeddings, label_text
from service.registry.stored_contents import InputRequest, embed, read_inputs
from service.store.database.connections import Database
from service.store.galleries.embeddings import has_own_embedding
from service.store.galleries.random_items import RandomItems
from service.store.image_store.blobs import Blobs
from service.store.sql.arrays import blocks
from service.store.sql.partitioned import of_item
from service.store.tables import embedding, item
from service.store.vectors.codec import from_bytes, is_usable
from service.store.vectors.reader import read_vectors


def make_pairs(
    database: Database,
    blobs: Blobs,
    decoder: Decoder,
    versions: tuple[LoadedVersion, LoadedVersion],
    *,
    gallery_id: int | None,
    label: str | None,
    count: int,
    seed: int,
) -> PairedEmbeddings:
    """Draw up to `count` items by `seed` that lack an embedding by one or both versions, and compute it.

    Nothing is stored. Items whose image or text cannot be read are left out, and with `label` those without that field.

    Raises:
        StoreUnreachable: the store of images and texts does not answer.
    """
    new, old = versions
    names: list[str] = []
    labels: list[str] = []
    parts: dict[str, list[Vectors]] = {new.name: [], old.name: []}
    for block in _drawn(database, versions, gallery_id, seed, count):
        if len(names) >= count:
            break
        with database.read() as connection:
            rows = list(_rows(connection, block, label))
            stored = {version.name: _stored(connection, gallery_id, version, block) for version in versions}
        vectors = _completed(blobs, decoder, versions, rows, stored)
        complete = [row for row in rows if all(row[0] in vectors[version.name] for version in versions)]
        for key, name, _, label_of in complete[: count - len(names)]:
            names.append(name)
            if label_of is not None:
                labels.append(label_of)
            for version in versions:
                parts[version.name].append(vectors[version.name][key])
    by_new, by_old = (np.array(parts[v.name], np.float32).reshape(-1, v.card.dim) for v in versions)
    return PairedEmbeddings(names, by_new, by_old, None if label is None else labels)


Row = tuple[int, str, str | None, str | None]
"""Key, id, blob key of the image or text, and label as text."""


def _drawn(
    database: Database, versions: tuple[LoadedVersion, LoadedVersion], gallery_id: int | None, seed: int, count: int
) -> Iterator[Sequence[int]]:
    """Keys of items that lack an embedding which can be computed, in batches; no transaction is open between them.

    Each pass over the items draws twice as many as the one before, so that few passes reach the last of them.
    """
    both = and_(*(has_own_embedding(version.id) for version in versions))
    obtainable = (or_(has_own_embedding(version.id), embeddable(version.id)) for version in versions)
    conditions = (item.c.deleted == false(), *(() if gallery_id is None else (item.c.gallery_id == gallery_id,)))
    eligible, seen = and_(*conditions, *obtainable, ~both), set[int]()
    while True:
        with database.read() as connection:
            drawn = RandomItems(connection, eligible, seed).first(2 * len(seen) + count)
        new_keys = [key for key in drawn if key not in seen]  # the first keys are those drawn before
        if not new_keys:
            return
        yield from blocks(new_keys, BATCH)
        seen.update(new_keys)


def _rows(connection: Connection, block: Sequence[int], label: str | None) -> Iterator[Row]:
    columns = (item.c.id, item.c.external_id, item.c.blob, item.c.metadata)
    rows = {row.id: row for row in connection.execute(select(*columns).where(item.c.id.in_(block)))}
    for row in (rows[key] for key in block if key in rows):
        if label is None or value_at(row.metadata, label) is not None:
            yield row.id, row.external_id, row.blob, None if label is None else label_text(row.metadata, label)


def _stored(
    connection: Connection, gallery_id: int | None, version: LoadedVersion, block: Sequence[int]
) -> dict[int, Vectors]:
    """Embeddings of items that a version itself made (origins OWN), by key."""
    conditions = (embedding.c.version_id == version.id, embedding.c.origin.in_(OWN), item.c.id.in_(block))
    where = conditions if gallery_id is None else (*conditions, item.c.gallery_id == gallery_id)
    statement = select(embedding.c.item_id, embedding.c.vector).join(item, of_item())
    rows = connection.execute(statement.where(*where)).all()
    stored = zip((row.item_id for row in rows), read_vectors(connection, [row.vector for row in rows]), strict=True)
    valid = {key: vector for key, vector in stored if is_usable(vector, version.card.dim)}
    return dict(zip(valid, from_bytes(list(valid.values()), version.card.dim), strict=True))


def _completed(
    blobs: Blobs,
    decoder: Decoder,
    versions: Sequence[LoadedVersion],
    rows: Sequence[Row],
    stored: dict[str, dict[int, Vectors]],
) -> dict[str, dict[int, Vectors]]:
    """Add to `stored` what the versions compute from images and texts, and return it."""
    missing = {key: [v for v in versions if key not in stored[v.name]] for key, *_ in rows}
    requests = {key: InputRequest(blob, missing[key]) for key, _, blob, _ in rows if blob and missing[key]}
    inputs = dict(zip(requests, read_inputs(blobs, decoder, list(requests.values())), strict=True))
    for version in versions:
        of_version = [(key, found[version.name]) for key, found in inputs.items() if found and version.name in found]
        vectors = embed(version, [one for _, one in of_version]).vectors
        stored[version.name] |= {key: vector for (key, _), vector in zip(of_version, vectors, strict=True)}
    return stored
