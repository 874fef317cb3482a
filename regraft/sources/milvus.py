"""`MilvusCollection`: a collection of Milvus, on a server or in a file (milvus-lite), iterated by Milvus's client."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pymilvus import MilvusClient

from regraft.sources.base import Batch, Wanted, batch_of, display_address


class MilvusCollection:
    """Entities of a collection in the order of their primary keys; `after` is the last key read."""

    def __init__(self, address: str, collection: str, wanted: Wanted, key: str | None) -> None:
        self._identity, self._wanted = f"milvus {display_address(address)} {collection}", wanted
        # pymilvus logs a traceback of each error that it raises.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        self._client = MilvusClient(uri=address, token=key or "")
        self._collection = collection
        about = self._client.describe_collection(collection)
        self._key = next(field["name"] for field in about["fields"] if field.get("is_primary"))
        self._fields = None if about.get("enable_dynamic_field") else [field["name"] for field in about["fields"]]
        self._vectors = [field["name"] for field in about["fields"] if "VECTOR" in field["type"].name]
        self._vector, self._version = wanted.vector_of(self._vectors, collection)
        if "://" not in address:
            # A collection in a file must be loaded before it is read; on a server loading is up to its owner.
            self._client.load_collection(collection)

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def count(self) -> int:
        return int(self._client.get_collection_stats(self._collection)["row_count"])

    @property
    def metrics(self) -> Mapping[str | None, str]:
        for name in self._client.list_indexes(self._collection, field_name=self._vector):
            if word := self._client.describe_index(self._collection, name).get("metric_type"):
                return {self._version: str(word)}
        return {}

    @property
    def fields(self) -> Sequence[str] | None:
        return self._fields

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        while rows := self._page(size, after):
            if after is None:
                self._wanted.check_first(rows)
            after = rows[-1][self._key]
            yield self._batch(rows, after)

    def _page(self, size: int, after: Any) -> list[dict[str, Any]]:
        """The next entities. A new iterator per page: one would continue after a string key without escaping it."""
        behind = "" if after is None else f"{self._key} > {json.dumps(after, ensure_ascii=False)}"
        pages = self._client.query_iterator(self._collection, batch_size=size, filter=behind, output_fields=["*"])
        try:
            return [dict(row) for row in pages.next()]
        finally:
            pages.close()

    def _batch(self, rows: Sequence[Mapping[str, Any]], after: Any) -> Batch:
        ids = self._wanted.ids_of(rows, [row[self._key] for row in rows])
        # A vector is no metadata, unless it is asked for.
        metadata = [self._wanted.metadata_of(row, self._wanted.id or self._key, *self._vectors) for row in rows]
        given = [(key, row.get(self._vector), one) for key, row, one in zip(ids, rows, metadata, strict=True)]
        return batch_of(given, self._version, after, self._wanted.texts_of(rows))
