"""PostgreSQL with pgvector as a remote engine: one table per collection, with an HNSW index ("graph") over its vectors.

Tables are in a separate schema, named by hashes, and listed in the table `collection`. One statement searches all
queries of a request. Vectors are transferred in binary, so that they come back bit for bit.

Inserting rows into a graph takes four times as long as building it over existing rows. So it is built after the first
full load, and `covered_seq` is set only then: before, no process drops these rows from memory or searches them here.

Shape suffixes: N rows, W their width, Q queries, C candidates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from index.engines.base import MISSING, Keys
from index.engines.pgvector.connections import MISSING_TABLE, NO_SETTINGS, PgConnections, PgVector, TimedConnection
from index.engines.remote.base import READ_TIMES, SEARCH_SECONDS, Candidates, Capabilities, Entries, Metric
from index.errors import InvalidArgument
from index.space import Vectors
from index.version import ShardKey

SCHEMA = "regraft_vectors"
WRITE_SECONDS, BUILD_SECONDS = 60.0, 6 * 3600.0
"""Time limits of calls that no query waits for, and of building a graph."""
BUILDING = {"maintenance_work_mem": "256MB", "max_parallel_maintenance_workers": "0"}
"""A graph beyond this memory is built as slowly as by inserts; parallel workers need shared memory, which containers
limit."""
LIMITS = Capabilities(max_k=16_384, max_keys=2_000, max_rows=2_000, max_width=4_000)
MAX_FLOAT32_WIDTH = 2_000
"""The graph stores wider vectors as float16, because pgvector's entries must fit a page. Rows are always float32."""
EFFORT, MIN_EFFORT, MAX_EFFORT = 4, 100, 1_000
"""`hnsw.ef_search` per candidate, its minimum, and its maximum (pgvector's own limit)."""
MAX_SCAN_TUPLES = 100_000
"""`hnsw.max_scan_tuples`: largest number of tuples that an iterative scan visits for more candidates."""
HEADER = np.dtype([("width", ">u2"), ("unused", ">u2")])

T = TypeVar("T")


class PgvectorEngine:
    """A PostgreSQL server; see the module."""

    def __init__(self, url: str, seconds: float = SEARCH_SECONDS) -> None:
        """`seconds`: time limit of queries."""
        self._searching, self._reading = PgConnections(url, seconds), PgConnections(url, READ_TIMES * seconds)
        self._writing, self._building = PgConnections(url, WRITE_SECONDS), PgConnections(url, BUILD_SECONDS)

    def collection(self, gallery: str, place: ShardKey, width: int, metric: Metric) -> PgvectorCollection:
        """See Engine."""
        if width > LIMITS.max_width:
            why = f"pgvector indexes vectors of up to {LIMITS.max_width} numbers, these have {width}"
            raise InvalidArgument(why, pointer="/index/kind")
        connections = self._searching, self._reading, self._writing, self._building
        return PgvectorCollection(*connections, gallery, place, width, metric)

    def places(self, gallery: str) -> list[ShardKey]:
        """See Engine."""
        with self._searching.take() as connection:
            try:
                asked = f"select version, origin from {SCHEMA}.collection where gallery = %s order by 1, 2"
                return [(row[0], row[1]) for row in connection.execute(asked, [gallery])]
            except MISSING_TABLE:
                return []

    def drop(self, gallery: str, place: ShardKey) -> None:
        """See Engine."""
        _drop(self._writing, "gallery = %s and version = %s and origin = %s", [gallery, *place])

    def check(self) -> None:
        """See Engine."""
        with self._searching.take() as connection:
            connection.execute("select 1")

    def close(self) -> None:
        """See Engine."""
        for connections in (self._searching, self._reading, self._writing, self._building):
            connections.close()


class PgvectorCollection:
    """One table; see Collection."""

    capabilities = LIMITS

    def __init__(
        self,
        searching: PgConnections,
        reading: PgConnections,
        writing: PgConnections,
        building: PgConnections,
        gallery: str,
        place: ShardKey,
        width: int,
        metric: Metric,
    ) -> None:
        self._searching, self._reading, self._writing, self._building = searching, reading, writing, building
        self._gallery, self._place, self._width = gallery, place, width
        name = hashlib.sha256("\0".join((gallery, *place, str(width), metric)).encode()).hexdigest()[:32]
        self._name, self._table = name, f"{SCHEMA}.v{name}"
        self._operator = "<#>" if metric is Metric.INNER_PRODUCT else "<->"
        self._class = "ip_ops" if metric is Metric.INNER_PRODUCT else "l2_ops"

    def upsert(self, entries: Entries, rows_NW: Vectors) -> None:
        """See Collection."""
        statement = f"""
            insert into {self._table} as held (key, number, digest, embedding)
            select * from unnest(%b::bigint[], %b::bigint[], %b::bigint[], %b::vector[])
            on conflict (key) do update set number = excluded.number, digest = excluded.digest, embedding =
                case when held.digest = excluded.digest then held.embedding else excluded.embedding end
            where held.number < excluded.number"""
        columns = [column.tolist() for column in entries]
        self._write(lambda connection: connection.execute(statement, [*columns, _to_binary(rows_NW)]))

    def delete(self, keys_N: Keys, seqs_N: Keys) -> None:
        """See Collection."""
        given = "unnest(%b::bigint[], %b::bigint[]) as given (key, number)"
        statement = (
            f"delete from {self._table} held using {given} where held.key = given.key and held.number <= given.number"
        )
        self._rows(self._writing, statement, [keys_N.tolist(), seqs_N.tolist()])

    def search(self, queries_QW: Vectors, c: int, *, keys_N: Keys | None = None, exact: bool = False) -> Candidates:
        """See Collection."""
        found = Candidates(
            np.full((len(queries_QW), c), MISSING, np.int64),
            np.zeros((len(queries_QW), c), np.int64),
            np.empty((len(queries_QW), c, self._width), np.float32),
        )
        every = exact or keys_N is not None
        where = "" if keys_N is None else "where key = any(%b::bigint[])"
        # A graph cannot order by key, too.
        order = f"{self._exact_order()}, key" if every else self._order()
        statement = f"""
            select query.number, found.key, found.number, vector_send(found.embedding)
            from unnest(%b::vector[]) with ordinality as query (vector, number), lateral
            (select key, number, embedding from {self._table} {where} order by {order} limit {int(c)}) as found"""
        values: list[Any] = [_to_binary(queries_QW), *([] if keys_N is None else [keys_N.tolist()])]
        settings = {
            "enable_indexscan": "off" if every else "on",
            "hnsw.ef_search": str(min(MAX_EFFORT, max(MIN_EFFORT, EFFORT * c))),
            "hnsw.iterative_scan": "strict_order",
            "hnsw.max_scan_tuples": str(MAX_SCAN_TUPLES),
        }
        rows = self._rows(self._searching, statement, values, settings)
        filled = [0] * len(queries_QW)
        for query, key, number, vector in rows:
            at = query - 1, filled[query - 1]
            found.keys_QC[at], found.seqs_QC[at], found.rows_QCW[at] = key, number, _from_binary(vector)
            filled[query - 1] += 1
        return found

    def entries(self, keys_N: Keys) -> Entries:
        """See Collection."""
        statement = f"select key, number, digest from {self._table} where key = any(%b::bigint[])"
        return _entries(self._rows(self._reading, statement, [keys_N.tolist()]))

    def listed(self, after: int, limit: int) -> Entries:
        """See Collection."""
        statement = f"select key, number, digest from {self._table} where key > %s order by key limit %s"
        return _entries(self._rows(self._reading, statement, [after, limit]))

    def fetch(self, keys_N: Keys) -> tuple[Entries, Vectors]:
        """See Collection."""
        columns = "key, number, digest, vector_send(embedding)"
        statement = f"select {columns} from {self._table} where key = any(%b::bigint[])"
        rows = self._rows(self._reading, statement, [keys_N.tolist()])
        vectors = [_from_binary(row[3]) for row in rows]
        return _entries([row[:3] for row in rows]), np.array(vectors, np.float32).reshape(-1, self._width)

    def covered_seq(self) -> int:
        """See Collection."""
        statement = f"select covers from {SCHEMA}.collection where name = %s"
        rows = self._rows(self._searching, statement, [self._name])
        return int(rows[0][0]) if rows else 0

    def set_covered_seq(self, seq: int, *, more: bool = False) -> None:
        """See Collection."""
        if more and not self._has_graph():
            seq = min(seq, 1)  # not 0: from 1 on a writer that continues also applies deletions
        elif not self._has_graph():
            self._write(lambda _: self._build())
        statement = f"update {SCHEMA}.collection set covers = %s where name = %s"

        def update(connection: TimedConnection) -> None:
            if not connection.execute(statement, [seq, self._name]).rowcount:
                self._create(connection)
                connection.execute(statement, [seq, self._name])

        self._write(update)

    def count(self) -> int:
        """See Collection."""
        rows = self._rows(self._writing, f"select count(*) from {self._table}", [])
        return int(rows[0][0]) if rows else 0

    def drop(self) -> None:
        """See Collection."""
        _drop(self._writing, "name = %s", [self._name])

    def _order(self) -> str:
        """The expression of the graph, so that PostgreSQL uses it."""
        if self._width <= MAX_FLOAT32_WIDTH:
            return self._exact_order()
        half = f"halfvec({self._width})"
        return f"embedding::{half} {self._operator} query.vector::{half}"

    def _exact_order(self) -> str:
        return f"embedding {self._operator} query.vector"

    def _write(self, work: Callable[[TimedConnection], T]) -> T:
        """Run a write, creating the table if there is none."""
        with self._writing.take() as connection:
            try:
                return work(connection)
            except MISSING_TABLE:
                self._create(connection)
                return work(connection)

    def _rows(
        self,
        connections: PgConnections,
        statement: str,
        values: Sequence[Any],
        settings: Mapping[str, str] = NO_SETTINGS,
    ) -> list[tuple[Any, ...]]:
        """The rows of a statement; none if there is no table."""
        with connections.take(settings) as connection:
            try:
                result = connection.execute(statement, values, binary=True)
                return result.fetchall() if result.description else []
            except MISSING_TABLE:
                return []

    def _has_graph(self) -> bool:
        """Whether the graph exists."""
        return bool(self._rows(self._writing, f"select 1 where to_regclass('{self._table}_graph') is not null", []))

    def _build(self) -> None:
        """Build the graph if it does not exist; blocks writes to the table."""
        operators, indexed = "vector_" + self._class, "embedding"
        if self._width > MAX_FLOAT32_WIDTH:
            indexed, operators = f"(embedding::halfvec({self._width}))", "halfvec_" + self._class
        graph = f"v{self._name}_graph on {self._table} using hnsw ({indexed} {operators})"
        with self._building.take(BUILDING) as connection:
            connection.execute(f"create index if not exists {graph}")

    def _create(self, connection: TimedConnection) -> None:
        """Create the table and the row that lists it, in one transaction; idempotent."""
        with connection.transaction():
            connection.execute("select pg_advisory_xact_lock(hashtext(%s))", [SCHEMA])
            connection.execute(f"create schema if not exists {SCHEMA}")
            connection.execute(
                f"create table if not exists {SCHEMA}.collection (name text primary key, gallery text not null, "
                "version text not null, origin text not null, covers bigint not null)"
            )
            connection.execute(
                f"create table if not exists {self._table} "
                f"(key bigint primary key, number bigint not null, digest bigint not null, "
                f"embedding vector({self._width}) not null)"
            )
            connection.execute(
                f"insert into {SCHEMA}.collection values (%s, %s, %s, %s, 0) on conflict do nothing",
                [self._name, self._gallery, *self._place],
            )


def _drop(connections: PgConnections, which: str, values: Sequence[str]) -> None:
    """Remove collections and the rows that list them; none is not an error."""
    with connections.take() as connection, suppress(*MISSING_TABLE), connection.transaction():
        asked = f"delete from {SCHEMA}.collection where {which} returning name"
        for (name,) in connection.execute(asked, values).fetchall():
            connection.execute(f"drop table if exists {SCHEMA}.v{name}")


def _to_binary(rows_NW: Vectors) -> list[PgVector]:
    """Pgvector's binary format: the number of dimensions, two unused bytes, big-endian float32."""
    head = np.array((rows_NW.shape[1], 0), HEADER).tobytes()
    return [PgVector(head + row.tobytes()) for row in rows_NW.astype(">f4")]


def _from_binary(vector: bytes) -> Vectors:
    return np.frombuffer(vector, ">f4", offset=HEADER.itemsize)


def _entries(rows: Sequence[Sequence[int]]) -> Entries:
    return Entries(*np.array(rows, np.int64).reshape(-1, 3).T)
