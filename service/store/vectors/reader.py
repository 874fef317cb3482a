"""Read vectors by their stored values: most are the vectors themselves, others locations in files; see `read_vectors`.

Files are read by groups of rows, some of which are cached. A vector whose file is missing, or whose row does not match
its digest, is read as `DAMAGED`; an unreachable store raises.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection

from index.engines.base import Keys
from index.engines.digest import digests
from service.store.image_store.blobs import MAX_PARALLEL, Blobs, StoreUnreachable
from service.store.vectors.codec import STORED, is_location, locations_from_bytes
from service.store.vectors.files import VectorFileRow, file_rows
from service.store.vectors.parquet import GROUP, NoParquet, describe, parquet, read_groups

if TYPE_CHECKING:
    import pyarrow.parquet as pq

DAMAGED = b""
"""The value of a vector that cannot be read; no version has this length."""
CACHE_BYTES = 64 << 20
"""Memory of cached groups, since other rows of a group may be needed."""
CACHED_FILES = 512
"""Files whose layout is cached."""
RUN = 16
"""Most adjacent groups that one request reads."""

R = TypeVar("R", bound=Any)
B = TypeVar("B", bytes, bytes | None)


class Group(NamedTuple):
    """Vectors (n, bytes per vector) and their digests (n,)."""

    rows: NDArray[np.uint8]
    digests: Keys


class OpenedFile(NamedTuple):
    """A file and its layout."""

    row: VectorFileRow
    about: pq.FileMetaData


class VectorReader:
    """Reads the files of one database's vectors. Thread-safe."""

    def __init__(self) -> None:
        self.blobs: Blobs | None = None
        """The store of the files, once it is opened."""
        self._lock = threading.Lock()
        # By the key of a file in the store: after a failover that lost writes, another file may have its number.
        self._opened: OrderedDict[str, OpenedFile] = OrderedDict()
        self._groups: OrderedDict[tuple[str, int], Group] = OrderedDict()
        self._bytes = 0

    def read(self, connection: Connection, stored: Sequence[bytes]) -> list[bytes]:
        """The vectors of stored locations, in order; `DAMAGED` for one that cannot be read.

        Raises:
            StoreUnreachable: the store does not answer.
            NoParquet: pyarrow is not installed.
        """
        locations = locations_from_bytes(stored)
        vectors = [DAMAGED] * len(stored)
        for row in file_rows(connection, np.unique(locations["file"]).tolist()):
            in_file = np.flatnonzero(locations["file"] == row.id)
            if (opened := self._open(row)) is None:
                continue
            groups = self._read_groups(opened, sorted(set((locations["row"][in_file] // GROUP).tolist())))
            for n in in_file.tolist():
                vectors[n] = _row(groups, int(locations["row"][n]), int(locations["digest"][n]))
        return vectors

    def _open(self, row: VectorFileRow) -> OpenedFile | None:
        """A file with its layout; None: it is missing or damaged."""
        with self._lock:
            if (opened := self._opened.get(row.key)) is not None:
                self._opened.move_to_end(row.key)
                return opened
        try:
            opened = OpenedFile(row, describe(row.bytes, partial(self._fetch, row.key)))
        except _NOT_DAMAGE:
            raise
        except Exception:  # pyarrow has many
            return None
        with self._lock:
            self._opened[row.key] = opened
            while len(self._opened) > CACHED_FILES:
                self._opened.popitem(last=False)
        return opened

    def _read_groups(self, opened: OpenedFile, wanted: Sequence[int]) -> dict[int, Group]:
        """The wanted groups, without those that cannot be read."""
        wanted = [group for group in wanted if group < opened.about.num_row_groups]
        key = opened.row.key
        with self._lock:
            found = {group: cached for group in wanted if (cached := self._groups.get((key, group)))}
            for group in found:
                self._groups.move_to_end((key, group))
        runs = list(_runs([group for group in wanted if group not in found]))
        if len(runs) > 1:
            with ThreadPoolExecutor(min(len(runs), MAX_PARALLEL), "vectors") as threads:
                loaded = list(threads.map(partial(self._load_run, opened), runs))
        else:
            loaded = [self._load_run(opened, run) for run in runs]
        for groups in loaded:
            found.update(groups)
            self._cache(key, groups)
        return found

    def _load_run(self, opened: OpenedFile, run: tuple[int, int]) -> dict[int, Group]:
        first, last = run
        row = opened.row
        try:
            read = read_groups(opened.about, first, last, row.bytes, partial(self._fetch, row.key))
        except _NOT_DAMAGE:
            raise
        except Exception:  # pyarrow has many
            # One by one, as only one of them may be damaged.
            return {} if first == last else _merged(self._load_run(opened, (n, n)) for n in range(first, last + 1))
        return {n: Group(rows, digests(rows.view(STORED))) for n, rows in enumerate(read, first)}

    def _fetch(self, key: str, start: int, end: int) -> bytes:
        if self.blobs is None:
            raise StoreUnreachable("vectors are in the image store, which this process has not opened")
        part = self.blobs.read_part(key, start, end)
        if part is None:
            raise _FileGone
        return part

    def _cache(self, key: str, groups: dict[int, Group]) -> None:
        with self._lock:
            for number, group in groups.items():
                if (key, number) not in self._groups:
                    self._groups[key, number] = group
                    self._bytes += group.rows.nbytes
            while self._bytes > CACHE_BYTES:
                _, oldest = self._groups.popitem(last=False)
                self._bytes -= oldest.rows.nbytes


class _FileGone(Exception):
    """The file is missing; never leaves this module."""


_NOT_DAMAGE = (StoreUnreachable, NoParquet)
"""Errors that do not mean that a file is damaged."""


def _runs(groups: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending groups as ranges (first, last) of adjacent ones, at most `RUN` long."""
    start = 0
    for n in range(1, len(groups) + 1):
        if n == len(groups) or groups[n] != groups[n - 1] + 1 or n - start == RUN:
            yield groups[start], groups[n - 1]
            start = n


def _merged(parts: Iterator[dict[int, Group]]) -> dict[int, Group]:
    return {number: group for part in parts for number, group in part.items()}


def _row(groups: dict[int, Group], row: int, digest: int) -> bytes:
    group = groups.get(row // GROUP)
    at = row % GROUP
    if group is None or at >= len(group.rows) or group.digests[at] != digest:
        return DAMAGED
    return bytes(group.rows[at])


def read_vectors(connection: Connection, stored: Sequence[B]) -> Sequence[B]:
    """The vectors of stored values, in order; None stays None. Raises StoreUnreachable, NoParquet."""
    in_files = [n for n, one in enumerate(stored) if is_location(one)]
    if not in_files:
        return stored
    parquet()
    reader: VectorReader = connection.get_execution_options()["vectors"]
    vectors = list(stored)
    for n, vector in zip(in_files, reader.read(connection, [one for one in stored if is_location(one)]), strict=True):
        vectors[n] = vector
    return vectors


def with_vectors(connection: Connection, rows: list[R], *fields: str) -> list[R]:
    """Rows (NamedTuples) with the stored values in `fields` replaced by their vectors."""
    for name in fields:
        stored = [getattr(row, name) for row in rows]
        if (read := read_vectors(connection, stored)) is not stored:
            rows = [row._replace(**{name: vector}) for row, vector in zip(rows, read, strict=True)]
    return rows
