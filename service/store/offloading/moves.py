"""Move vectors from the database into files of the image store (`offload`), and back (`load_back`).

A vector stays in the database until a file with it is durably written; then a transaction replaces it by its location
in the file, unless its item was written meanwhile. A kill loses nothing: it leaves at most a file to which no row
refers, and the file's own row.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, bindparam, func, select, update

from index.engines.base import Keys
from index.engines.digest import digests
from index.events import Event
from service.errors import UnknownGallery
from service.store.database.connections import Database
from service.store.galleries.gallery import take_seq
from service.store.image_store.blobs import Blobs
from service.store.image_store.object_store import VECTOR_FILES
from service.store.sql.arrays import blocks, key_table
from service.store.sql.database_clock import now
from service.store.sql.partitioned import in_gallery
from service.store.tables import embedding, item
from service.store.vectors.codec import STORED, STORED_DIGEST, locations_in_file
from service.store.vectors.files import (
    ABANDONED,
    VectorFileRow,
    activate_file,
    begin_file,
    count_live,
    drop_file,
    files,
    forget_file,
    read_from_database,
    rows_in_file,
    vector_file,
)
from service.store.vectors.parquet import write_vectors
from service.store.vectors.reader import read_vectors

logger = logging.getLogger(__name__)

BLOCK = 5_000
"""Vectors that one transaction moves."""
PAUSE_SECONDS = 0.005
"""Pause between two blocks, in which other writers get the lock."""
GRACE_SECONDS = 3600.0
"""How long an unreferenced file stays, as a reader of an older snapshot may still need it."""


class Settled(NamedTuple):
    """N vectors of one length: item keys (N,), their feed numbers (N,), the bytes, and digests (N,)."""

    items: Keys
    seqs: Keys
    rows: list[bytes]
    digests: Keys


def offload(
    database: Database,
    blobs: Blobs,
    place: tuple[int, int],
    keys: Sequence[int],
    upto: int,
    least: int,
    goes_on: Callable[[], bool],
    uploading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Keys:
    """Write the vectors of items into one file, and replace them in the database by their locations.

    Args:
        database: the database of the vectors.
        blobs: the store of the file.
        place: gallery and version of the vectors.
        keys: the items.
        upto: items written after this feed number stay.
        least: if there are fewer vectors, they all stay.
        goes_on: called before the upload and between transactions; False ends the move, and the rest is moved later.
        uploading: the context of the upload, which may take minutes.

    Returns:
        The items that stay because there are too few.

    Raises:
        StorageFull, StoreUnreachable: nothing is moved.
        NoParquet: pyarrow is not installed.
    """
    gallery_id, version_id = place
    with database.read() as connection:
        found = _settled(connection, place, keys, upto)
    if len(found.rows) < least:
        return found.items
    if not goes_on():
        return np.empty(0, np.int64)
    about = {"gallery": str(gallery_id), "version": str(version_id), "vector": f"{STORED.str}, one after the other"}
    content = write_vectors(found.items, found.seqs, found.digests, found.rows, about)
    sha256 = hashlib.sha256(content).hexdigest()
    with database.write() as connection:
        items = found.items.tolist()
        file = begin_file(connection, gallery_id, version_id, sha256, len(content), items, VECTOR_FILES)
    with uploading():
        blobs.put(file.key, content)
    moved = _store_places(database, file, found, goes_on)
    logger.info(Event("vectors_moved", gallery_id=gallery_id, version_id=version_id, file=file.key, items=moved))
    return np.empty(0, np.int64)


def _settled(connection: Connection, place: tuple[int, int], keys: Sequence[int], upto: int) -> Settled:
    """The vectors of the most frequent length that match their stored digests."""
    found = [row for block in blocks(sorted(keys)) for row in read_from_database(connection, *place, block, upto)]
    lengths = Counter(len(vector) for _, _, vector, _ in found)
    ((length, _),) = lengths.most_common(1) or [(0, 0)]
    if not length or length % STORED.itemsize:
        return Settled(np.empty(0, np.int64), np.empty(0, np.int64), [], np.empty(0, np.int64))
    found = [row for row in found if len(row[2]) == length]
    computed = digests(np.frombuffer(b"".join(row[2] for row in found), STORED).reshape(len(found), -1))
    stored_digests = [digest.tobytes() for digest in computed.astype(STORED_DIGEST)]
    matching = [n for n, row in enumerate(found) if row[3] is None or bytes(row[3]) == stored_digests[n]]
    kept = [found[n] for n in matching]
    items, seqs = (np.fromiter((row[column] for row in kept), np.int64) for column in (0, 1))
    return Settled(items, seqs, [row[2] for row in kept], computed[matching])


def _store_places(database: Database, file: VectorFileRow, found: Settled, goes_on: Callable[[], bool]) -> int:
    """Replace the vectors of items that were not written since by their locations in a file; returns how many."""
    locations, moved = locations_in_file(file.id, found.digests), 0
    for start in range(0, len(found.rows), BLOCK):
        if not goes_on():
            return moved
        part = slice(start, start + BLOCK)
        try:
            with database.write() as connection:
                take_seq(connection, file.gallery_id, 0)  # no item is written until the commit
                if not activate_file(connection, file.id):
                    return moved  # another process took over and dropped the file
                unchanged = _unchanged(connection, found.items[part], found.seqs[part]) + start
                moved += _put_locations(connection, file, found, locations, unchanged)
        except UnknownGallery:
            return moved  # the gallery was deleted, with everything in it
        time.sleep(PAUSE_SECONDS)
    return moved


def _unchanged(connection: Connection, items: Keys, seqs: Keys) -> Keys:
    """The positions of the items that still have these feed numbers."""
    keys = key_table(connection, items.tolist())
    found = connection.execute(select(item.c.id, item.c.seq).where(item.c.id.in_(keys.keys)))
    now = dict(map(tuple, found))
    same = [now.get(key) == seq for key, seq in zip(items.tolist(), seqs.tolist(), strict=True)]
    return np.flatnonzero(same)


def _put_locations(
    connection: Connection, file: VectorFileRow, found: Settled, locations: NDArray[np.void], these: Keys
) -> int:
    if not len(these):
        return 0
    items, noted = found.items[these].tolist(), found.digests[these].astype(STORED_DIGEST)
    rows = [
        {"key": key, "location": location.tobytes(), "noted": digest.tobytes()}
        for key, location, digest in zip(items, locations[these], noted, strict=True)
    ]
    # One statement per row: in a join with a list of keys, SQLite would scan the list for every row of the version.
    conditions = (in_gallery(embedding, file.gallery_id), embedding.c.version_id == file.version_id)
    here = (*conditions, embedding.c.item_id == bindparam("key"))
    length = func.length(embedding.c.vector) == len(found.rows[0])
    point = update(embedding).where(*here, length).values(vector=bindparam("location"), digest=bindparam("noted"))
    return int(connection.execute(point, rows).rowcount)


def load_back(database: Database, file: VectorFileRow, stop: threading.Event) -> tuple[list[int], int]:
    """Load the vectors of a file back into the database; returns the items, and how many vectors are damaged and stay.

    Raises:
        StoreUnreachable, NoParquet: the file cannot be read; vectors that were loaded before stay loaded.
    """
    brought: list[int] = []
    after, damaged = 0, 0
    while not stop.wait(PAUSE_SECONDS):
        with database.read() as connection:
            found = rows_in_file(connection, file, after, BLOCK)
            vectors = read_vectors(connection, [stored for _, stored in found])
        if not found:
            break
        after = found[-1][0]
        readable = [(key, stored, vector) for (key, stored), vector in zip(found, vectors, strict=True) if vector]
        damaged += len(found) - len(readable)
        if readable:
            try:
                with database.write() as connection:
                    take_seq(connection, file.gallery_id, 0)
                    _put_vectors(connection, file, readable)
            except UnknownGallery:
                break
        brought += [key for key, _, _ in readable]
    return brought, damaged


def _put_vectors(connection: Connection, file: VectorFileRow, whole: Sequence[tuple[int, bytes, bytes]]) -> None:
    """Replace locations in a file by their vectors, in rows that have not changed."""
    conditions = (in_gallery(embedding, file.gallery_id), embedding.c.version_id == file.version_id)
    held = (*conditions, embedding.c.item_id == bindparam("key"))
    still = embedding.c.vector == bindparam("stored")
    rows = [{"key": key, "stored": stored, "held": vector} for key, stored, vector in whole]
    connection.execute(update(embedding).where(*held, still).values(vector=bindparam("held")), rows)


def drop_unused(database: Database, file: VectorFileRow) -> bool:
    """Drop a file if no row refers to it; returns whether none does."""
    try:
        with database.write() as connection:
            take_seq(connection, file.gallery_id, 0)  # no row can begin to refer to it until the commit
            if count_live(connection, file):
                return False
            drop_file(connection, file.id)
    except UnknownGallery:
        pass  # `sweep` finds the file once the gallery is freed
    return True


def sweep(database: Database, blobs: Blobs) -> None:
    """Drop files of writers that were killed or lost their lease, and of deleted galleries; remove old dropped files.

    Raises StoreUnreachable.
    """
    with database.lookup() as connection:
        lost = files(connection, ABANDONED)
        due = files(connection, vector_file.c.state == "dropped", vector_file.c.since < now() - GRACE_SECONDS)
    for file in lost:
        with database.write() as connection:
            drop_file(connection, file.id, ABANDONED)  # unless it was activated meanwhile
    if due:
        blobs.check()
    for file in due:
        blobs.remove([file.key])
        with database.write() as connection:
            forget_file(connection, file.id)
