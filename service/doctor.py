"""The doctor: looks through a data folder for what should not be there, says what to do, and mends what is safe.

Safe is what changes no answer but a wrong one: vectors are brought to unit length, items whose active embedding is
missing go to one they hold, and files that nothing refers to are removed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, exists, false, func, select, update

from index.errors import RegraftError
from index.folder import load_version
from index.space import UNIT_TOLERANCE, Cosine, space_from_json
from service.blobs import Blobs
from service.database import Database
from service.deployments.placement import preference, route_to
from service.repository import STORED, STREAMED, all_galleries, from_bytes, take_seq, to_bytes
from service.settings import Settings
from service.tables import embedding, gallery, item
from service.versions.catalog import Catalog, Registered, registered_rows
from service.versions.incoming import remains

ROWS = 4096
EXAMPLES = 5
ORPHAN_SECONDS = 3600.0
"""An image younger than this may belong to a write that is not committed yet."""


@dataclass
class Finding:
    """Something wrong: `count` things of one kind, some of them by name, and what to do about them.

    `severity`: `error` (answers are wrong or missing), `warning` (something will go wrong) or `info`.
    """

    code: str
    severity: str
    what: str
    advice: str
    count: int = 0
    examples: list[str] = field(default_factory=list)
    fixed: int = 0
    fixable: bool = False

    def add(self, example: str, count: int = 1) -> None:
        """Count one more."""
        self.count += count
        if len(self.examples) < EXAMPLES:
            self.examples.append(example)


class Doctor:
    """Examines what one settings object points to."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database
        self._blobs = Blobs(settings.blobs_url)

    def examine(self, *, fix: bool = False) -> list[Finding]:
        """Every finding, the worst first; with `fix`, what is safe to mend is mended."""
        findings = self._folders(fix)
        broken = {example for f in findings if f.code == "version_changed" for example in f.examples}
        if not broken:
            catalog = Catalog(self._database, self._settings)
            catalog.sync()
            for look in (self._vectors, self._places, self._reach):
                findings += look(catalog, fix)
        findings += self._images(fix)
        order = {"error": 0, "warning": 1, "info": 2}
        return sorted((f for f in findings if f.count), key=lambda f: (order[f.severity], f.code))

    # Version folders

    def _folders(self, fix: bool) -> list[Finding]:
        changed = Finding(
            "version_changed",
            "error",
            "version folders are no longer what was registered",
            "restore the folder from its archive; the service refuses to start with it",
        )
        left = Finding("upload_left", "info", "remains of uploads that were killed", "removed at start", fixable=True)
        with self._database.lookup() as connection:
            rows = registered_rows(connection)
        for row in rows:
            try:
                load_version(self._settings.versions / row.name, expect_card=row.card_sha256)
            except RegraftError as error:
                changed.add(row.name)
                changed.what = f"version folders are no longer what was registered ({error.message})"
        for folder in remains(self._settings.versions):
            left.add(folder.name)
            if fix:
                shutil.rmtree(folder, ignore_errors=True)
                left.fixed += 1
        return [changed, left]

    # Embeddings

    def _vectors(self, catalog: Catalog, fix: bool) -> list[Finding]:
        found = _vector_findings()
        long: list[Row[Any]] = []
        seen: dict[tuple[int, int], dict[bytes, str]] = defaultdict(dict)
        with self._database.read() as connection:
            for block in _embeddings(connection):
                for row in block:
                    self._check_shape(catalog, row, found)
                    _check_double(row, seen[row.gallery_id, row.version_id], found["duplicate_vector"])
                long += _check_numbers(catalog, block, found)
        if fix and long:
            found["not_unit_vector"].fixed = self._normalise(catalog, long)
        return list(found.values())

    def _check_shape(self, catalog: Catalog, row: Row[Any], found: dict[str, Finding]) -> None:
        card = catalog.by_id(row.version_id).card
        if len(row.vector) != card.dim * STORED.itemsize:
            found["wrong_dimension"].add(f"{row.external_id}: {len(row.vector) // STORED.itemsize} of {card.name}")
        if row.side is not None and len(row.side) != card.side_dim * STORED.itemsize:
            found["wrong_side"].add(f"{row.external_id}: {len(row.side) // STORED.itemsize} of {card.name}")

    def _normalise(self, catalog: Catalog, rows: Sequence[Row[Any]]) -> int:
        """Replace vectors that are still as they were read; replicas follow where they are active."""
        mended = 0
        for row in rows:
            (vector,) = from_bytes([row.vector], catalog.by_id(row.version_id).card.dim)
            unit = to_bytes(vector / np.linalg.norm(vector.astype(np.float64)))
            same = (embedding.c.item_id == row.item_id, embedding.c.version_id == row.version_id)
            with self._database.write() as connection:
                seq = take_seq(connection, row.gallery_id, 1)
                changed = update(embedding).where(*same, embedding.c.vector == row.vector).values(vector=unit)
                mended += connection.execute(changed).rowcount
                active = (item.c.id == row.item_id, item.c.active_id == row.version_id, item.c.deleted == false())
                connection.execute(update(item).where(*active).values(seq=seq))
        return mended

    # Items

    def _places(self, catalog: Catalog, fix: bool) -> list[Finding]:
        lost = Finding(
            "no_active_embedding",
            "error",
            "items are in no shard: the embedding they are active in is missing",
            "--fix puts them where another embedding of theirs belongs; for the rest start a reencode backfill, or "
            "ingest them again",
            fixable=True,
        )
        for row in self._galleries():
            with self._database.read() as connection:
                missing = connection.execute(_without_embedding(row.id)).all()
            for each in missing:
                lost.add(f"{row.name}/{each.external_id}")
            if fix and missing and row.current_id is not None:
                lost.fixed += self._place(catalog, row, [each.id for each in missing])
        return [lost]

    def _place(self, catalog: Catalog, row: Row[Any], ids: list[int]) -> int:
        best = {held.id: n for n, held in enumerate(preference(catalog, catalog.by_id(row.current_id)))}
        placed = 0
        with self._database.write() as connection:
            first = take_seq(connection, row.id, len(ids))
            still = {each.id for each in connection.execute(_without_embedding(row.id))}
            for number, key in enumerate(key for key in ids if key in still):
                held = connection.execute(select(embedding.c.version_id).where(embedding.c.item_id == key)).scalars()
                if version_id := min(held, key=lambda v: best.get(v, len(best)), default=None):
                    moved = update(item).where(item.c.id == key).values(active_id=version_id, seq=first + number)
                    placed += connection.execute(moved).rowcount
        return placed

    def _reach(self, catalog: Catalog, fix: bool) -> list[Finding]:
        unreachable = Finding(
            "unreachable",
            "error",
            "items lie in versions that queries of the current version cannot reach",
            "start a backfill, add an edge, or roll back",
        )
        unused = Finding("version_unused", "info", "versions that no gallery uses and no edge needs", "nothing to do")
        used: set[int] = set()
        for row in self._galleries():
            current = None if row.current_id is None else catalog.by_id(row.current_id)
            with self._database.read() as connection:
                mix = connection.execute(_mix(row.id)).all()
                used |= {row.current_id, *connection.execute(_versions_held(row.id)).scalars()}
            for version_id, count in mix:
                held = catalog.by_id(version_id)
                if current is not None and route_to(catalog, current, held) is None:
                    unreachable.add(f"{row.name}: {count} items of {held.name}", count)
        needed = {edge.old for edge in catalog.graph().edges}
        for registered in catalog.all():
            if registered.id not in used and registered.name not in needed:
                unused.add(registered.name)
        return [unreachable, unused]

    def _galleries(self) -> Sequence[Row[Any]]:
        with self._database.lookup() as connection:
            return all_galleries(connection)

    # Images

    def _images(self, fix: bool) -> list[Finding]:
        orphan = Finding("orphan_blob", "info", "images that no item refers to", "--fix removes them", fixable=True)
        missing = Finding(
            "image_missing",
            "warning",
            "items whose image is gone: they can be found, but not re-encoded",
            "restore the images, or ingest the items again",
        )
        # What is stored is listed first: an item that comes meanwhile is not taken for one without its image.
        stored = dict(self._blobs.all())
        with self._database.read() as connection:
            named = select(item.c.blob, item.c.external_id, gallery.c.name).join(gallery)
            rows = connection.execute(named.where(item.c.blob.is_not(None))).all()
        referred = {row.blob for row in rows}
        for row in rows:
            if row.blob not in stored and not self._blobs.exists(row.blob):
                missing.add(f"{row.name}/{row.external_id}")
        for key, age in stored.items():
            if key not in referred and age > ORPHAN_SECONDS:
                orphan.add(key)
                if fix:
                    self._blobs.remove([key])
                    orphan.fixed += 1
        return [orphan, missing]


def _vector_findings() -> dict[str, Finding]:
    again = "encode them again: delete the embedding's items or start a reencode backfill"
    made = [
        Finding("wrong_dimension", "error", "vectors have another length than their version's", again),
        Finding("wrong_side", "error", "side-information has another length than its version's", again),
        Finding("not_finite", "error", "vectors hold NaN or infinite numbers", again),
        Finding("zero_vector", "error", "vectors are all zero where a direction is needed", again),
        Finding("not_unit_vector", "error", "vectors of a cosine space are not of unit length", "--fix", fixable=True),
        Finding("duplicate_vector", "info", "items hold the vector of another item", "the same image, stored twice"),
    ]
    return {finding.code: finding for finding in made}


def _embeddings(connection: Connection) -> Iterator[Sequence[Row[*tuple[Any, ...]]]]:
    columns = (item.c.gallery_id, item.c.external_id, *embedding.c)
    statement = select(*columns).join(item, item.c.id == embedding.c.item_id).order_by(embedding.c.version_id)
    yield from connection.execute(statement, execution_options=STREAMED).partitions(ROWS)


def _check_double(row: Row[Any], seen: dict[bytes, str], found: Finding) -> None:
    digest = hashlib.blake2b(row.vector, digest_size=16).digest()
    if digest in seen:
        found.add(f"{row.external_id} = {seen[digest]}")
    else:
        seen[digest] = row.external_id


def _check_numbers(catalog: Catalog, block: Sequence[Row[Any]], found: dict[str, Finding]) -> list[Row[Any]]:
    """Look at vectors of the right length; returns those that can be normalised."""
    long: list[Row[Any]] = []
    for version_id in {row.version_id for row in block}:
        registered: Registered = catalog.by_id(version_id)
        size = registered.card.dim * STORED.itemsize
        rows = [row for row in block if row.version_id == version_id and len(row.vector) == size]
        vectors = from_bytes([row.vector for row in rows], registered.card.dim).astype(np.float64)
        finite: NDArray[np.bool_] = np.asarray(np.isfinite(vectors).all(axis=1))
        length = np.linalg.norm(np.where(finite[:, None], vectors, 0.0), axis=1)
        cosine = isinstance(space_from_json(dict(registered.card.space)), Cosine)
        for row, good, norm in zip(rows, finite, length, strict=True):
            if not good:
                found["not_finite"].add(f"{row.external_id} of {registered.name}")
            elif cosine and norm == 0:
                found["zero_vector"].add(f"{row.external_id} of {registered.name}")
            elif cosine and abs(norm - 1) > UNIT_TOLERANCE:
                found["not_unit_vector"].add(f"{row.external_id} of {registered.name}: {norm:.4g}")
                long.append(row)
    return long


def _without_embedding(gallery_id: int) -> Any:
    active = exists().where(embedding.c.item_id == item.c.id, embedding.c.version_id == item.c.active_id)
    return select(item.c.id, item.c.external_id).where(
        item.c.gallery_id == gallery_id, item.c.deleted == false(), ~active
    )


def _mix(gallery_id: int) -> Any:
    live = (item.c.gallery_id == gallery_id, item.c.deleted == false())
    return select(item.c.active_id, func.count()).where(*live).group_by(item.c.active_id)


def _versions_held(gallery_id: int) -> Any:
    held = select(embedding.c.version_id).join(item, item.c.id == embedding.c.item_id)
    return held.where(item.c.gallery_id == gallery_id).distinct()
