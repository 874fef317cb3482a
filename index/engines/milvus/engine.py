"""Milvus as a remote engine. `index.engines.remote.base` defines the interface, docs/engines.md states its costs.

Milvus upserts by primary key, without conditions. So a row is stored for each (key, feed number), and rows below the
highest number of their key are removed after each write.

Its index is approximate also for searches restricted to keys. Exact and restricted searches are computed in this
process, from rows that are read page by page.

Shape suffixes: N rows, W their width, Q queries, C candidates, P rows of a page.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from index.engines.base import MISSING, Keys
from index.engines.exact import nearest_rows
from index.engines.milvus.server import MilvusServer
from index.engines.milvus.table import MAX_RESULTS, VECTOR, MilvusTable, Row, row_id
from index.engines.remote.base import (
    READ_TIMES,
    SEARCH_SECONDS,
    Candidates,
    Capabilities,
    EngineUnavailable,
    Entries,
    Metric,
)
from index.errors import InvalidArgument, InvalidVector
from index.space import Cosine, Euclidean, Vectors
from index.version import ShardKey

WRITE_SECONDS = 60.0
"""Time limit of calls that no query waits for, and of reading all rows."""
MIN_WIDTH, MAX_WIDTH = 2, 32_768
"""Milvus's limits of the dimension of a vector."""
MAX_KEYS = 4096
"""Largest number of keys in an expression: 80 kB of text."""
MESSAGE_BYTES = 32 << 20
"""Bytes of one request or answer: half of Milvus's limit of a request, 64 MB, and a third of that of an answer."""
MAX_QUERIES = 32
"""Queries per call of search: its time limit is for these, however many a request has."""
SEARCH_BYTES = 4 << 20
"""Bytes of a page when all rows are read: it must arrive within the time limit of a search."""
ROW_BYTES = 100
"""Bytes of a row without its vector."""


class MilvusEngine:
    """A server of Milvus; see `index.engines.remote.base.Engine`."""

    def __init__(self, uri: str, token: str = "", seconds: float = SEARCH_SECONDS) -> None:
        """Does not connect yet.

        Args:
            uri: http:// or https://, with the name of a database as path, if any.
            token: `user:password`, or a key; empty: none.
            seconds: time limit of queries.
        """
        self._searching = MilvusServer(uri, token, seconds)
        self._reading = MilvusServer(uri, token, READ_TIMES * seconds)
        self._writing = MilvusServer(uri, token, WRITE_SECONDS)

    def collection(self, gallery: str, place: ShardKey, width: int, metric: Metric) -> MilvusCollection:
        """See Engine."""
        if not MIN_WIDTH <= width <= MAX_WIDTH:
            why = f"Milvus accepts vectors of {MIN_WIDTH} to {MAX_WIDTH} numbers, these have {width}"
            raise InvalidArgument(why, pointer="/index/kind")
        servers = self._searching, self._reading, self._writing
        return MilvusCollection(*(MilvusTable(server, _name(gallery, place), width, metric) for server in servers))

    def places(self, gallery: str) -> list[ShardKey]:
        """See Engine."""
        prefix, names = _prefix(gallery), self._searching.collections()
        found = (name.removeprefix(prefix).split("__") for name in names if name.startswith(prefix))
        return [(_unescaped(version), _unescaped(origin)) for version, origin in found]

    def drop(self, gallery: str, place: ShardKey) -> None:
        """See Engine."""
        self._writing.drop(_name(gallery, place))

    def check(self) -> None:
        """See Engine."""
        self._searching.collections()

    def close(self) -> None:
        """See Engine."""
        for server in (self._searching, self._reading, self._writing):
            server.close()


class MilvusCollection:
    """The rows of one version and origin of one gallery; see `index.engines.remote.base.Collection`."""

    def __init__(self, searching: MilvusTable, reading: MilvusTable, writing: MilvusTable) -> None:
        """The same table with the time limits of queries, of loads and of writes."""
        self._searching, self._reading, self._table = searching, reading, writing
        self.name = writing.name
        self._row_bytes = 4 * writing.width + ROW_BYTES
        self._page = min(MAX_RESULTS, MESSAGE_BYTES // self._row_bytes)
        some = min(MAX_KEYS, self._page)
        self.capabilities = Capabilities(max_k=self._page, max_keys=some, max_rows=some, max_width=MAX_WIDTH)

    def upsert(self, entries: Entries, rows_NW: Vectors) -> None:
        """Store rows; see Collection.

        Raises:
            InvalidVector: a row is not finite.
            InvalidArgument: the rows have another width, or are more than `max_rows`.
        """
        most, width = self.capabilities.max_rows, self._table.width
        if rows_NW.shape != (len(entries.keys_N), width) or len(rows_NW) > most:
            raise InvalidArgument(f"Milvus accepts up to {most} rows of {width} numbers, not {rows_NW.shape}")
        if not np.isfinite(rows_NW).all():
            raise InvalidVector("a vector has numbers that are not finite")
        if len(rows_NW):
            columns = zip(*map(np.ndarray.tolist, entries), rows_NW, strict=True)
            self._table.put(
                [
                    {"id": row_id(key, seq), "key": key, "number": seq, "digest": digest, VECTOR: row_W}
                    for key, seq, digest, row_W in columns
                ]
            )
            self._remove_older(entries.keys_N)

    def delete(self, keys_N: Keys, seqs_N: Keys) -> None:
        """See Collection."""
        most = dict(zip(keys_N.tolist(), seqs_N.tolist(), strict=True))
        for page in self._pages_of(self._table, keys_N):
            self._table.remove([row["id"] for row in page if row["number"] <= most[row["key"]]])

    def search(self, queries_QW: Vectors, c: int, *, keys_N: Keys | None = None, exact: bool = False) -> Candidates:
        """See Collection."""
        if not len(queries_QW) or exact or keys_N is not None:
            return self._compare_all(queries_QW, c, keys_N)
        found = _nothing(len(queries_QW), c, self._table.width)
        step = min(MAX_QUERIES, max(1, MESSAGE_BYTES // (c * self._row_bytes)))
        for start in range(0, len(queries_QW), step):
            for query, hits in enumerate(self._searching.nearest(queries_QW[start : start + step], c), start):
                for place, hit in enumerate(hits):
                    found.keys_QC[query, place], found.seqs_QC[query, place] = hit["key"], hit["number"]
                    found.rows_QCW[query, place] = hit[VECTOR]
        return found

    def entries(self, keys_N: Keys) -> Entries:
        """See Collection."""
        return _entries(_newest(row for page in self._pages_of(self._reading, keys_N) for row in page))

    def listed(self, after: int, limit: int) -> Entries:
        """See Collection."""
        newest: dict[int, Row] = {}
        for page in self._reading.pages(f'id >= "{row_id(after + 1, 0)}"', min(MAX_RESULTS, limit + 1)):
            newest |= {row["key"]: row for row in page}
            if len(newest) > limit:  # then all rows of the last key wanted were read
                break
        return _entries(list(newest.values())[:limit])

    def fetch(self, keys_N: Keys) -> tuple[Entries, Vectors]:
        """See Collection."""
        rows = _newest(row for page in self._pages_of(self._reading, keys_N, VECTOR) for row in page)
        return _entries(rows), self._vectors(rows)

    def covered_seq(self) -> int:
        """See Collection."""
        return self._searching.covered_seq()

    def set_covered_seq(self, seq: int, *, more: bool = False) -> None:
        """See Collection."""
        self._table.set_covered_seq(seq)

    def count(self) -> int:
        """See Collection."""
        return self._table.count()

    def drop(self) -> None:
        """See Collection."""
        self._table.drop()

    def _pages_of(self, table: MilvusTable, keys_N: Keys, *more: str) -> Iterable[list[Row]]:
        """The rows of some keys, see `MilvusTable.pages`."""
        return table.pages(_among(keys_N), self._page, *more)

    def _remove_older(self, keys_N: Keys) -> None:
        """Remove the rows of these keys except the one with the highest number of each."""
        older: list[str] = []
        last: Row | None = None
        for page in self._pages_of(self._table, keys_N):
            for row in page:
                if last is not None and last["key"] == row["key"]:
                    older.append(last["id"])
                last = row
        for start in range(0, len(older), MAX_KEYS):
            self._table.remove(older[start : start + MAX_KEYS])

    def _compare_all(self, queries_QW: Vectors, c: int, keys_N: Keys | None) -> Candidates:
        """The c best of all rows, or of those of some keys, read and compared in this process."""
        # Spaces that compare rows as they are, by this metric.
        space = Cosine() if self._table.metric is Metric.INNER_PRODUCT else Euclidean()
        best = _nothing(len(queries_QW), c, self._table.width)
        scores_QC = np.full((len(queries_QW), c), np.inf, np.float32)
        size = self._page if keys_N is not None else max(1, min(MAX_RESULTS, SEARCH_BYTES // self._row_bytes))
        where = "" if keys_N is None else _among(keys_N)
        deadline = time.monotonic() + WRITE_SECONDS
        for page in self._searching.pages(where, size, VECTOR) if len(queries_QW) else ():
            if time.monotonic() > deadline:
                raise EngineUnavailable("Milvus did not return all rows in time")
            rows_PW, (keys_P, seqs_P, _) = self._vectors(page), _entries(page)
            # Ties in the order of the page, which is that of the keys.
            near_QC, at_QC = nearest_rows(space, queries_QW, rows_PW, None, min(c, len(page)))
            both_QC = np.concatenate([scores_QC, -near_QC if space.higher_is_better else near_QC], axis=1)
            order_QC = np.argsort(both_QC, axis=1, kind="stable")[:, :c]
            scores_QC = np.take_along_axis(both_QC, order_QC, axis=1)
            keys_QC = np.concatenate([best.keys_QC, keys_P[at_QC]], axis=1)
            seqs_QC = np.concatenate([best.seqs_QC, seqs_P[at_QC]], axis=1)
            rows_QCW = np.concatenate([best.rows_QCW, rows_PW[at_QC]], axis=1)
            best = Candidates(
                np.take_along_axis(keys_QC, order_QC, axis=1),
                np.take_along_axis(seqs_QC, order_QC, axis=1),
                np.take_along_axis(rows_QCW, order_QC[:, :, None], axis=1),
            )
        return best

    def _vectors(self, rows: list[Row]) -> Vectors:
        return np.array([row[VECTOR] for row in rows], np.float32).reshape(-1, self._table.width)


def _prefix(gallery: str) -> str:
    """The prefix of the names of a gallery's collections: letters, digits and _, not beginning with a digit."""
    return f"regraft_{hashlib.sha256(gallery.encode()).hexdigest()[:32]}__"


def _name(gallery: str, place: ShardKey) -> str:
    return _prefix(gallery) + "__".join(_escaped(word) for word in place)


def _among(keys_N: Keys) -> str:
    return f"key in {keys_N.tolist()}"


def _escaped(word: str) -> str:
    """A word as letters, digits and _, never with two _ in a row."""
    return re.sub(rb"[^A-Za-z0-9]", lambda found: b"_%02x" % found[0][0], word.encode()).decode()


def _unescaped(word: str) -> str:
    return re.sub(rb"_(..)", lambda found: bytes.fromhex(found[1].decode()), word.encode()).decode()


def _entries(rows: Iterable[Mapping[str, Any]]) -> Entries:
    triples = [(row["key"], row["number"], row["digest"]) for row in rows]
    return Entries(*np.array(triples, np.int64).reshape(-1, 3).T)


def _newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each key, of rows sorted by id."""
    return list({row["key"]: row for row in rows}.values())


def _nothing(queries: int, c: int, width: int) -> Candidates:
    keys_QC = np.full((queries, c), MISSING, np.int64)
    return Candidates(keys_QC, np.zeros((queries, c), np.int64), np.zeros((queries, c, width), np.float32))
