"""`MilvusTable`: one Milvus collection as rows by id, created by the first write, loaded by the first read.

A row has an id, key, feed number, digest and vector. Ids are hexadecimal of fixed length and sort as (key, number);
rows are read in pages by id. Pages are not from one snapshot, but a newer row of a key has a higher id, so no key that
stays in the collection is skipped.

The covered feed number is a row in a separate partition, so that it is removed with the collection.

Shape suffixes: W width of a row, Q queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from pymilvus import DataType

from index.engines.milvus.server import MilvusServer, NotFound, NotLoaded
from index.engines.remote.base import EngineUnavailable, Metric
from index.space import Vectors

Found = TypeVar("Found")
Row = dict[str, Any]

MAX_RESULTS = 16_384
"""Milvus's limit of the results of a search or a query, and of the queries of one search."""
ROWS, COVERS = "rows", "covers"
"""The partitions of a collection."""
ROW_FIELDS = ["id", "key", "number", "digest"]
VECTOR = "vector"
HNSW = {"M": 16, "efConstruction": 200}
MIN_EF, EF = 64, 2
"""Search effort `ef`: its minimum, and its factor of the rows wanted."""


def row_id(key: int, seq: int) -> str:
    """The id of a row; also the bound of a range of rows."""
    return f"{key:016x}{seq:016x}"


class MilvusTable:
    """See the module. Thread-safe."""

    def __init__(self, server: MilvusServer, name: str, width: int, metric: Metric) -> None:
        self.name, self.width, self.metric = name, width, metric
        self._server = server
        self._type = "IP" if metric is Metric.INNER_PRODUCT else "L2"

    def put(self, rows: list[Row]) -> None:
        """Store rows, replacing rows with the same id."""
        self._write(rows, ROWS)

    def remove(self, ids: list[str]) -> None:
        """Remove the rows of these ids; unknown ones are ignored."""
        if ids:
            self._read(lambda client: client.delete(self.name, ids=ids, partition_name=ROWS, **self._limited), None)

    def pages(self, where: str, size: int, *more: str) -> Iterator[list[Row]]:
        """The rows that match an expression, by id, in pages of `size`; none if there is no collection.

        `where`: empty for all; `more`: fields to read besides ROW_FIELDS.
        """
        last = ""
        while True:
            behind = f'id > "{last}"' + (f" and {where}" if where else "")
            page = self._query(
                behind,
                [*ROW_FIELDS, *more],
                # As the client's iterator does to read rows in the order of their ids; but that one makes calls without
                # a time limit.
                limit=size,
                iterator="True",
                reduce_stop_for_best="True",
            )
            ids = [row["id"] for row in page]
            if ids != sorted(ids) or (ids and ids[0] <= last):
                raise EngineUnavailable("Milvus returned rows that are not in the order of their ids")
            if page:
                yield page
            if len(page) < size:
                return
            last = ids[-1]

    def nearest(self, queries_QW: Vectors, count: int) -> list[list[Row]]:
        """For each query, up to `count` rows by the index, best first."""
        how = {"metric_type": self._type, "params": {"ef": max(MIN_EF, EF * count)}}
        found: Any = self._read(
            lambda client: client.search(
                self.name,
                list(queries_QW),
                limit=count,
                output_fields=["key", "number", VECTOR],
                search_params=how,
                partition_names=[ROWS],
                anns_field=VECTOR,
                consistency_level="Strong",
                **self._limited,
            ),
            [],
        )
        return [[hit["entity"] for hit in hits] for hits in found]

    def count(self) -> int:
        """Number of rows."""
        found = self._query("key >= 0", ["count(*)"])
        return int(found[0]["count(*)"]) if found else 0

    def covered_seq(self) -> int:
        """The covered feed number; 0 if none was set."""
        found = self._query(f'id == "{COVERS}"', ["number"], partition=COVERS)
        return int(found[0]["number"]) if found else 0

    def set_covered_seq(self, seq: int) -> None:
        """Set the covered feed number, as durably as the rows stored before."""
        nothing_W = np.zeros(self.width, np.float32)
        self._write([{"id": COVERS, "key": 0, "number": seq, "digest": 0, VECTOR: nothing_W}], COVERS)

    def drop(self) -> None:
        """Remove the collection; idempotent."""
        self._server.drop(self.name)

    @property
    def _limited(self) -> dict[str, float]:
        return {"timeout": self._server.seconds}

    def _query(self, where: str, fields: Sequence[str], partition: str = ROWS, **how: Any) -> list[Row]:
        return self._read(
            lambda client: client.query(
                self.name,
                filter=where,
                output_fields=list(fields),
                partition_names=[partition],
                consistency_level="Strong",
                **self._limited,
                **how,
            ),
            [],
        )

    def _read(self, call: Callable[[Any], Found], nothing: Found) -> Found:
        """Run a reading call, loading the collection if needed; `nothing` if there is no collection."""
        try:
            try:
                return self._server.ask(call)
            except NotLoaded:
                self._load()
                return self._server.ask(call)
        except NotFound:
            return nothing
        except NotLoaded:
            raise EngineUnavailable("Milvus is loading a collection") from None

    def _write(self, rows: list[Row], partition: str) -> None:
        """Store rows in a partition, creating the collection if there is none."""

        def write(client: Any) -> None:
            client.upsert(self.name, rows, partition_name=partition, **self._limited)

        try:
            self._server.ask(write)
        except NotFound:
            self._make()
            self._server.ask(write)

    def _make(self) -> None:
        """Create the missing parts of the collection: a process may have been killed while it created them."""
        with self._server.making:
            if not self._server.ask(lambda client: client.has_collection(self.name, **self._limited)):
                self._server.ask(self._create)
            self._server.ask(self._divide)
            self._load()

    def _create(self, client: Any) -> None:
        schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=len(row_id(0, 0)))
        for field in ("key", "number", "digest"):
            schema.add_field(field, DataType.INT64)
        schema.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=self.width)
        client.create_collection(self.name, schema=schema, consistency_level="Strong", **self._limited)

    def _divide(self, client: Any) -> None:
        for partition in (ROWS, COVERS):
            if not client.has_partition(self.name, partition, **self._limited):
                client.create_partition(self.name, partition, **self._limited)

    def _load(self) -> None:
        """Create its indexes and load it; idempotent."""
        self._server.ask(self._index)
        self._server.ask(lambda client: client.load_collection(self.name, **self._limited))

    def _index(self, client: Any) -> None:
        there = client.list_indexes(self.name, **self._limited)
        for field, how in (
            (VECTOR, {"index_type": "HNSW", "metric_type": self._type, "params": HNSW}),
            ("key", {"index_type": "INVERTED"}),
        ):
            if field not in there:
                params = client.prepare_index_params()
                params.add_index(field, index_name=field, **how)
                client.create_index(self.name, params, **self._limited)
