"""Pairs made on the spot: stored images and texts embedded by the versions that say nothing of them yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from sqlalchemy import Connection, and_, false, or_, select

from index.decoding import Decoder
from index.encoder import BATCH
from index.filter import value_at
from index.space import Vectors
from service.backfills.planner import embeddable
from service.registry.paired_embeddings import OWN, PairedEmbeddings, label_text
from service.registry.registry import LoadedVersion
from service.registry.stored_contents import InputRequest, embed, read_inputs
from service.store.blobs import Blobs
from service.store.database import Database
from service.store.drawing import Drawing
from service.store.embeddings import says_itself
from service.store.partitioned import of_item
from service.store.sql_arrays import blocks
from service.store.tables import embedding, item
from service.store.vector_codec import from_bytes, is_whole
from service.store.vector_reader import read_vectors


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
    """Up to `count` items, drawn by `seed`, that do not hold embeddings by both versions: what is missing is made.

    Nothing is stored. Items whose image or text cannot be read are left out, with `label` those without that field.

    Raises:
        StoreUnreachable: images and texts are out of reach.
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
            held = {version.name: _held(connection, gallery_id, version, block) for version in versions}
        made = _embedded(blobs, decoder, versions, rows, held)
        whole = [row for row in rows if all(row[0] in made[version.name] for version in versions)][: count - len(names)]
        names += [name for _, name, _, _ in whole]
        labels += [found for *_, found in whole if found is not None]
        for version in versions:
            parts[version.name] += [made[version.name][key] for key, *_ in whole]
    by_new, by_old = (
        np.stack(parts[version.name]) if names else np.empty((0, version.card.dim), np.float32) for version in versions
    )
    return PairedEmbeddings(names, by_new, by_old, None if label is None else labels)


Row = tuple[int, str, str | None, str | None]
"""Key, id, where its image or text lies, and its label as text."""


def _drawn(
    database: Database, versions: tuple[LoadedVersion, LoadedVersion], gallery_id: int | None, seed: int, count: int
) -> Iterator[Sequence[int]]:
    """Items of which something is missing that can be made, a batch at a time; nobody reads in between."""
    both = and_(*(says_itself(version.id) for version in versions))
    able = (or_(says_itself(version.id), embeddable(version.id)) for version in versions)
    mine = (item.c.deleted == false(), *(() if gallery_id is None else (item.c.gallery_id == gallery_id,)))
    among, seen = and_(*mine, *able, ~both), set[int]()
    while True:
        with database.read() as connection:
            drawn = Drawing(connection, among, seed).first(len(seen) + count)
        more = [key for key in drawn if key not in seen]  # drawn again, the first are the same
        if not more:
            return
        yield from blocks(more, BATCH)
        seen.update(more)


def _rows(connection: Connection, block: Sequence[int], label: str | None) -> Iterator[Row]:
    columns = (item.c.id, item.c.external_id, item.c.blob, item.c.metadata)
    there = {row.id: row for row in connection.execute(select(*columns).where(item.c.id.in_(block)))}
    for row in (there[key] for key in block if key in there):
        if label is None or value_at(row.metadata, label) is not None:
            yield row.id, row.external_id, row.blob, None if label is None else label_text(row.metadata, label)


def _held(
    connection: Connection, gallery_id: int | None, version: LoadedVersion, block: Sequence[int]
) -> dict[int, Vectors]:
    """What a version itself said of items, by their keys."""
    mine = (embedding.c.version_id == version.id, embedding.c.origin.in_(OWN), item.c.id.in_(block))
    where = mine if gallery_id is None else (*mine, item.c.gallery_id == gallery_id)
    held_by = select(embedding.c.item_id, embedding.c.vector).join(item, of_item())
    rows = connection.execute(held_by.where(*where)).all()
    held = zip((row.item_id for row in rows), read_vectors(connection, [row.vector for row in rows]), strict=True)
    good = {key: vector for key, vector in held if is_whole(vector, version.card.dim)}
    return dict(zip(good, from_bytes(list(good.values()), version.card.dim), strict=True))


def _embedded(
    blobs: Blobs,
    decoder: Decoder,
    versions: Sequence[LoadedVersion],
    rows: Sequence[Row],
    held: dict[str, dict[int, Vectors]],
) -> dict[str, dict[int, Vectors]]:
    """What is held and, where it is not, what the versions make of images and texts."""
    missing = {key: [v for v in versions if key not in held[v.name]] for key, *_ in rows}
    requests = {key: InputRequest(blob, missing[key]) for key, _, blob, _ in rows if blob and missing[key]}
    inputs = dict(zip(requests, read_inputs(blobs, decoder, list(requests.values())), strict=True))
    for version in versions:
        mine = [(key, found[version.name]) for key, found in inputs.items() if found and version.name in found]
        vectors = embed(version, [one for _, one in mine]).vectors
        held[version.name] |= {key: vector for (key, _), vector in zip(mine, vectors, strict=True)}
    return held
