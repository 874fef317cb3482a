"""Check embeddings: wrong length, not finite, zero, not of unit length, or duplicates."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, delete, false, literal, select, update

from index.space import UNIT_TOLERANCE, Cosine, space_from_json
from service.backfills.supplied import tracking_supplied
from service.doctor.findings import Context, Finding
from service.doctor.on_disk import KeysOnDisk
from service.errors import UnknownGallery
from service.registry.loaded_version import LoadedVersion
from service.store.galleries.gallery import take_seq
from service.store.image_store.blobs import StoreUnreachable
from service.store.rows import GalleryRow, all_of
from service.store.sql.arrays import blocks, key_range
from service.store.sql.partitioned import in_gallery, of_item
from service.store.tables import embedding, gallery, item
from service.store.vectors.codec import STORED, digests_to_bytes, from_bytes, is_location, to_bytes
from service.store.vectors.parquet import NoParquet
from service.store.vectors.reader import with_vectors

ITEMS = 4096
"""Items that are checked at a time."""
BLOCK = 500
"""Embeddings fixed in one transaction."""


class StoredRow(NamedTuple):
    """An embedding with its item; `name` is its gallery's."""

    gallery_id: int
    name: str
    external_id: str
    blob: str | None
    item_id: int
    version_id: int
    origin: str
    vector: bytes
    side: bytes | None
    uncertainty: float | None
    digest: bytes | None
    stored: bytes
    """The database column of `vector`, which may hold the vector's location in a file instead."""


class Damaged(NamedTuple):
    """A damaged embedding, the code of its finding, and how this names it."""

    row: StoredRow
    code: str
    example: str


Fix = Callable[[Connection, StoredRow], bool]
"""Fixes an embedding unless it has changed since it was read; returns whether it did."""


def check(context: Context, fix: bool) -> list[Finding]:
    """The findings that `_findings` lists; the check ends, with those found so far, where the store is away."""
    found = _findings()
    try:
        with closing(KeysOnDisk()) as digests:
            for row in context.galleries():
                for block in _readable(_embeddings(context, row), found["vector_unreadable"]):
                    _check_block(context, block, found, digests, fix=fix)
    except (StoreUnreachable, NoParquet) as error:
        found["vectors_unseen"].add(error.message)
    return list(found.values())


def _check_block(
    context: Context, block: list[StoredRow], found: dict[str, Finding], digests: KeysOnDisk, *, fix: bool
) -> None:
    """Check all embeddings of some items, and fix them."""
    damaged: list[Damaged] = []
    unnormalised: list[Damaged] = []
    for version_id in {row.version_id for row in block}:
        rows = [row for row in block if row.version_id == version_id]
        well_shaped = _check_shapes(context.registry.by_id(version_id), rows, found, damaged)
        unnormalised += _check_numbers(context.registry.by_id(version_id), well_shaped, damaged)
    for one in (*damaged, *unnormalised):
        found[one.code].add(one.example)
    bad = {(one.row.item_id, one.row.version_id) for one in damaged}
    for row in block:
        if (row.item_id, row.version_id) not in bad:
            _check_duplicate(row, digests, found["duplicate_vector"])
    if fix:
        _fix(context, unnormalised, found, partial(_normalise, context))
        intact = {(row.item_id, row.version_id) for row in block} - bad
        _discard(context, damaged, found, intact)


def _findings() -> dict[str, Finding]:
    advice = (
        "--fix removes those of items with another embedding, or with an image that the current version can encode "
        "(start a reencode backfill then); ingest the others again"
    )
    findings = [
        Finding("wrong_dimension", "error", "vectors have the wrong dimension for their version", advice, fixable=True),
        Finding("not_finite", "error", "vectors have NaN or infinite numbers", advice, fixable=True),
        Finding("zero_vector", "error", "vectors of a cosine space are zero", advice, fixable=True),
        Finding(
            "wrong_side",
            "error",
            "side-information has the wrong length for its version: transform cannot move these items",
            "queries are correct; ingest the items again, or move them by a reencode backfill",
        ),
        Finding("not_unit_vector", "error", "vectors of a cosine space are not of unit length", "--fix", fixable=True),
        Finding(
            "vector_unreadable",
            "error",
            "vectors are in files that are missing or damaged",
            "restore the files and restart the API processes; else ingest the items again, or move them by a reencode "
            "backfill",
        ),
        Finding("vectors_unseen", "error", "checks of vectors ended early", "make what is missing available"),
        Finding(
            "duplicate_vector", "info", "items have the same vector as another item", "the same content is stored twice"
        ),
    ]
    return {finding.code: finding for finding in findings}


def _embeddings(context: Context, gallery: GalleryRow) -> Iterator[list[StoredRow]]:
    """All embeddings of a gallery in blocks of items, each read in its own transaction."""
    item_columns = (item.c.gallery_id, literal(gallery.name).label("name"), item.c.external_id, item.c.blob)
    columns = (*item_columns, *embedding.c, embedding.c.vector.label("stored"))
    condition, after = item.c.gallery_id == gallery.id, None
    all_rows = select(*columns).select_from(embedding.join(item, of_item())).where(condition)
    while True:
        with context.database.read() as connection:
            keys = key_range(connection, item.c.id, condition, ITEMS, after)
            if not len(keys):
                return
            statement = all_rows.where(item.c.id.between(int(keys[0]), int(keys[-1])))
            ordered = statement.order_by(embedding.c.version_id, item.c.id)
            block = with_vectors(connection, all_of(StoredRow, connection.execute(ordered)), "vector")
        yield block
        after = int(keys[-1])


def _readable(blocks_of_rows: Iterable[list[StoredRow]], unreadable: Finding) -> Iterator[list[StoredRow]]:
    """Leave out, and report, rows whose vector's file cannot be read: it may come back, so they are not fixed."""
    for block in blocks_of_rows:
        for row in block:
            if not row.vector and is_location(row.stored):
                unreadable.add(_label(row))
        yield [row for row in block if row.vector or not is_location(row.stored)]


def _label(row: StoredRow) -> str:
    return f"{row.name}/{row.external_id}"


def _check_shapes(
    version: LoadedVersion, rows: Sequence[StoredRow], found: dict[str, Finding], damaged: list[Damaged]
) -> list[StoredRow]:
    """Check the lengths of vectors and side-information; returns the rows whose vectors have the right length."""
    card = version.card
    well_shaped = []
    for row in rows:
        if len(row.vector) == card.dim * STORED.itemsize:
            well_shaped.append(row)
        else:
            example = f"{_label(row)}: {len(row.vector) // STORED.itemsize} of {card.name}"
            damaged.append(Damaged(row, "wrong_dimension", example))
        if row.side is not None and len(row.side) != card.side_dim * STORED.itemsize:
            found["wrong_side"].add(f"{_label(row)}: {len(row.side) // STORED.itemsize} of {card.name}")
    return well_shaped


def _check_numbers(version: LoadedVersion, rows: Sequence[StoredRow], damaged: list[Damaged]) -> list[Damaged]:
    """Check vectors of the right length; returns those that can be normalised."""
    unnormalised: list[Damaged] = []
    vectors = from_bytes([row.vector for row in rows], version.card.dim).astype(np.float64)
    finite = np.asarray(np.isfinite(vectors).all(axis=1))
    length = np.linalg.norm(np.where(finite[:, None], vectors, 0.0), axis=1)
    cosine = isinstance(space_from_json(dict(version.card.space)), Cosine)
    for row, good, norm in zip(rows, finite, length, strict=True):
        code = "not_finite" if not good else "zero_vector" if cosine and norm == 0 else None
        if code is not None:
            damaged.append(Damaged(row, code, f"{_label(row)} of {version.name}"))
        elif cosine and abs(norm - 1) > UNIT_TOLERANCE:
            example = f"{_label(row)} of {version.name}: {norm:.4g}"
            unnormalised.append(Damaged(row, "not_unit_vector", example))
    return unnormalised


def _check_duplicate(row: StoredRow, digests: KeysOnDisk, found: Finding) -> None:
    place = f"{row.gallery_id} {row.version_id} ".encode()
    digest = hashlib.blake2b(row.vector, digest_size=16).digest()
    first = digests.add(place + digest, row.external_id)
    if first != row.external_id:
        found.add(f"{_label(row)} = {first}")


def _fix(context: Context, rows: Sequence[Damaged], found: dict[str, Finding], change: Fix) -> None:
    """Fix rows of one gallery, one block per transaction, with new feed numbers for replicas.

    Those that another doctor has fixed meanwhile are no findings any more.
    """
    for block in blocks(rows, BLOCK):
        gallery_id = block[0].row.gallery_id
        with suppress(UnknownGallery), context.database.write() as connection:
            first = take_seq(connection, gallery_id, len(block))
            with tracking_supplied(connection, gallery_id, sorted({one.row.external_id for one in block})):
                for seq, (row, code, example) in enumerate(block, first):
                    if change(connection, row):
                        found[code].fixed += 1
                        _renumber(connection, row, seq)
                    elif _is_settled(connection, row):
                        found[code].withdraw(example)


def _normalise(context: Context, connection: Connection, row: StoredRow) -> bool:
    """Normalise a vector unless it has changed since it was read."""
    (vector,) = from_bytes([row.vector], context.registry.by_id(row.version_id).card.dim)
    unit = (vector / np.linalg.norm(vector.astype(np.float64))).astype(np.float32)
    values = {"vector": to_bytes(unit), "digest": digests_to_bytes(unit[np.newaxis])}
    return bool(connection.execute(update(embedding).where(*_unchanged(row)).values(values)).rowcount)


def _discard(
    context: Context, damaged: Sequence[Damaged], found: dict[str, Finding], intact: AbstractSet[tuple[int, int]]
) -> None:
    """Remove embeddings that have not changed since they were read, of items that keep something better.

    `intact`: the items and versions whose vectors were read and are not damaged. Others may be in files that are lost.
    """
    with context.database.lookup() as connection:
        images_needed = {
            row.blob for row, *_ in damaged if row.blob is not None and not _holds_better(connection, row, intact)
        }
    # Before the transaction, for which writers wait, as the store may be slow.
    images = _stored_images(context, images_needed)

    def discard(connection: Connection, row: StoredRow) -> bool:
        if not (_holds_better(connection, row, intact) or _can_be_reencoded(context, connection, row, images)):
            return False
        return bool(connection.execute(delete(embedding).where(*_unchanged(row))).rowcount)

    _fix(context, damaged, found, discard)


def _stored_images(context: Context, keys: Iterable[str]) -> AbstractSet[str]:
    """Those of the keys that the store has; none if it does not answer, which the check of images reports."""
    try:
        return {key for key in keys if context.blobs.exists(key)}
    except StoreUnreachable:
        return frozenset()


def _holds_better(connection: Connection, row: StoredRow, intact: AbstractSet[tuple[int, int]]) -> bool:
    conditions = (in_gallery(embedding, row.gallery_id), embedding.c.item_id == row.item_id)
    versions = connection.execute(select(embedding.c.version_id).where(*conditions))
    return any((row.item_id, version_id) in intact for version_id in versions.scalars())


def _can_be_reencoded(context: Context, connection: Connection, row: StoredRow, images: AbstractSet[str]) -> bool:
    """Whether a reencode backfill could embed the item by the current version; its image must be among `images`."""
    columns = select(item.c.blob, gallery.c.current_id).join(gallery, gallery.c.id == item.c.gallery_id)
    stored = connection.execute(columns.where(item.c.id == row.item_id)).one()
    if stored.blob not in images or stored.current_id is None:
        return False
    current = context.registry.by_id(stored.current_id)
    return bool(current.card.encoder) and not current.problem


def _is_settled(connection: Connection, row: StoredRow) -> bool:
    """Whether the embedding was removed or replaced since it was read, and not only moved into a file or out of it."""
    stored = connection.execute(select(embedding.c.vector).where(*_key_of(row))).scalar_one_or_none()
    return stored is None or not (stored in {row.stored, row.vector} or is_location(stored))


def _key_of(row: StoredRow) -> tuple[Any, ...]:
    return (
        in_gallery(embedding, row.gallery_id),
        embedding.c.item_id == row.item_id,
        embedding.c.version_id == row.version_id,
    )


def _unchanged(row: StoredRow) -> tuple[Any, ...]:
    return (*_key_of(row), embedding.c.vector == row.stored)


def _renumber(connection: Connection, row: StoredRow, seq: int) -> None:
    live = (item.c.id == row.item_id, item.c.deleted == false())
    connection.execute(update(item).where(*live).values(seq=seq))
