"""A collection of Milvus, on a server or in a file (milvus-lite), iterated by its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pymilvus import MilvusClient

from regraft.sources.base import Batch, Wanted, batch_of, place_of


class MilvusCollection:
    """Entities of a collection in the order of their primary keys; `after` is the last of those."""

    def __init__(self, address: str, collection: str, wanted: Wanted, key: str | None) -> None:
        self._identity, self._wanted = f"milvus {place_of(address)} {collection}", wanted
        self._client = MilvusClient(uri=address, token=key or "")
        self._collection = collection
        fields = self._client.describe_collection(collection)["fields"]
        self._key = next(field["name"] for field in fields if field.get("is_primary"))

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def count(self) -> int:
        return int(self._client.get_collection_stats(self._collection)["row_count"])

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        name, version = self._wanted.vector("vector")
        behind = "" if after is None else f"{self._key} > {json.dumps(after)}"
        pages = self._client.query_iterator(self._collection, batch_size=size, filter=behind, output_fields=["*"])
        try:
            while page := pages.next():
                rows = [dict(row) for row in page]
                key = self._wanted.id or self._key
                told = [self._wanted.described(row, key, name) for row in rows]
                given = [(row[key], row.get(name), one) for row, one in zip(rows, told, strict=True)]
                texts, after = self._wanted.said(rows, first=after is None), rows[-1][self._key]
                yield batch_of(given, version, after, texts)
        finally:
            pages.close()
