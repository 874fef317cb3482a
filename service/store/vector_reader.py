"""The one way from what the database stores of vectors to the vectors: most are at hand, others lie in files.

Files are read by groups of rows, some of which are kept in memory. A file that is gone, or a row of it that is not what
its digest says, is a damaged vector: what comes of it has no number. A store that is out of reach says nothing of them.
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
from service.store.blobs import AT_ONCE, Blobs, StoreUnreachable
from service.store.vector_codec import STORED, is_place, places_from_bytes
from service.store.vector_files import VectorFileRow, file_row
from service.store.vector_parquet import GROUP, NoParquet, describe, parquet, read_groups

if TYPE_CHECKING:
    import pyarrow.parquet as pq

DAMAGED = b""
"""What comes of a vector that cannot be read: it is of no version's length."""
KEPT_BYTES = 64 << 20
"""Memory of the groups that are kept for who asks for their other rows."""
KEPT_FILES = 512
"""Files of which is kept how they are laid out."""
RUN = 16
"""Groups next to each other that one request brings."""

R = TypeVar("R", bound=Any)
B = TypeVar("B", bytes, bytes | None)


class Group(NamedTuple):
    """Vectors (n, bytes of one) and their digests (n,)."""

    rows: NDArray[np.uint8]
    digests: Keys


class OpenedFile(NamedTuple):
    """A file and how it is laid out."""

    row: VectorFileRow
    about: pq.FileMetaData


class VectorReader:
    """The files of one database's vectors."""

    def __init__(self) -> None:
        self.blobs: Blobs | None = None
        """Where the files lie, once that is opened."""
        self._lock = threading.Lock()
        self._opened: OrderedDict[int, OpenedFile] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], Group] = OrderedDict()
        self._bytes = 0

    def read(self, connection: Connection, stored: Sequence[bytes]) -> list[bytes]:
        """The vectors of stored places, in order; `DAMAGED` where there is none.

        Raises:
            StoreUnreachable: nothing can be said of them.
            NoParquet: this process cannot read any.
        """
        places = places_from_bytes(stored)
        made = [DAMAGED] * len(stored)
        for file in np.unique(places["file"]).tolist():
            condition = np.flatnonzero(places["file"] == file)
            if (opened := self._open(connection, file)) is None:
                continue
            groups = self._read_groups(opened, sorted(set((places["row"][condition] // GROUP).tolist())))
            for n in condition.tolist():
                made[n] = _row(groups, int(places["row"][n]), int(places["digest"][n]))
        return made

    def _open(self, connection: Connection, file: int) -> OpenedFile | None:
        """How a file is laid out; None: it is gone, or damaged."""
        with self._lock:
            if (opened := self._opened.get(file)) is not None:
                self._opened.move_to_end(file)
                return opened
        row = file_row(connection, file)
        if row is None:
            return None
        try:
            opened = OpenedFile(row, describe(row.bytes, partial(self._fetch, row.key)))
        except _NOT_DAMAGE:
            raise
        except Exception:  # pyarrow has many
            return None
        with self._lock:
            self._opened[file] = opened
            while len(self._opened) > KEPT_FILES:
                self._opened.popitem(last=False)
        return opened

    def _read_groups(self, opened: OpenedFile, wanted: Sequence[int]) -> dict[int, Group]:
        """Those of the groups that can be read."""
        wanted = [group for group in wanted if group < opened.about.num_row_groups]
        with self._lock:
            found = {group: kept for group in wanted if (kept := self._groups.get((opened.row.id, group)))}
            for group in found:
                self._groups.move_to_end((opened.row.id, group))
        runs = list(_runs([group for group in wanted if group not in found]))
        if len(runs) > 1:
            with ThreadPoolExecutor(min(len(runs), AT_ONCE), "vectors") as threads:
                brought = list(threads.map(partial(self._bring, opened), runs))
        else:
            brought = [self._bring(opened, run) for run in runs]
        for some in brought:
            found.update(some)
            self._keep(opened.row.id, some)
        return found

    def _bring(self, opened: OpenedFile, run: tuple[int, int]) -> dict[int, Group]:
        first, last = run
        row = opened.row
        try:
            read = read_groups(opened.about, first, last, row.bytes, partial(self._fetch, row.key))
        except _NOT_DAMAGE:
            raise
        except Exception:  # pyarrow has many
            # One by one: those around a damaged one are whole.
            return {} if first == last else _together(self._bring(opened, (n, n)) for n in range(first, last + 1))
        return {n: Group(rows, digests(rows.view(STORED))) for n, rows in enumerate(read, first)}

    def _fetch(self, key: str, start: int, end: int) -> bytes:
        if self.blobs is None:
            raise StoreUnreachable("vectors lie in the image store, which this process has not opened")
        part = self.blobs.read_part(key, start, end)
        if part is None:
            raise _Gone
        return part

    def _keep(self, file: int, groups: dict[int, Group]) -> None:
        with self._lock:
            for number, group in groups.items():
                if (file, number) not in self._groups:
                    self._groups[file, number] = group
                    self._bytes += group.rows.nbytes
            while self._bytes > KEPT_BYTES:
                _, oldest = self._groups.popitem(last=False)
                self._bytes -= oldest.rows.nbytes


class _Gone(Exception):
    """The file is not there; never leaves this module."""


_NOT_DAMAGE = (StoreUnreachable, NoParquet)
"""What says nothing of a file."""


def _runs(groups: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Groups in ascending order as ranges of those that follow each other, at most `RUN` long."""
    start = 0
    for n in range(1, len(groups) + 1):
        if n == len(groups) or groups[n] != groups[n - 1] + 1 or n - start == RUN:
            yield groups[start], groups[n - 1]
            start = n


def _together(parts: Iterator[dict[int, Group]]) -> dict[int, Group]:
    return {number: group for part in parts for number, group in part.items()}


def _row(groups: dict[int, Group], row: int, digest: int) -> bytes:
    group = groups.get(row // GROUP)
    place = row % GROUP
    if group is None or place >= len(group.rows) or group.digests[place] != digest:
        return DAMAGED
    return bytes(group.rows[place])


def read_vectors(connection: Connection, stored: Sequence[B]) -> Sequence[B]:
    """The vectors of what is stored, in order; also of None, which stays. Raises StoreUnreachable, NoParquet."""
    far = [n for n, one in enumerate(stored) if is_place(one)]
    if not far:
        return stored
    parquet()
    reader: VectorReader = connection.get_execution_options()["vectors"]
    made = list(stored)
    for n, vector in zip(far, reader.read(connection, [one for one in stored if is_place(one)]), strict=True):
        made[n] = vector
    return made


def with_vectors(connection: Connection, rows: list[R], *fields: str) -> list[R]:
    """Rows (NamedTuples) whose `fields` are stored vectors, with the vectors in their place."""
    for name in fields:
        stored = [getattr(row, name) for row in rows]
        if (read := read_vectors(connection, stored)) is not stored:
            rows = [row._replace(**{name: vector}) for row, vector in zip(rows, read, strict=True)]
    return rows
