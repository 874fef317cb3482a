"""A collection of Qdrant, on a server or in a folder (its local mode), scrolled by its own client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from qdrant_client import QdrantClient

from regraft.sources.base import Batch, Column, Wanted, as_json, batch_of


class QdrantCollection:
    """Points of a collection; `after` is the point to go on with. Named vectors are columns."""

    def __init__(self, address: str, collection: str, wanted: Wanted, key: str | None) -> None:
        self._identity = f"qdrant {address} {collection}"
        self._client = QdrantClient(url=address, api_key=key) if "://" in address else QdrantClient(path=address)
        self._collection, self._wanted = collection, wanted

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def count(self) -> int:
        return int(self._client.count(self._collection).count)

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        while True:
            points, after = self._client.scroll(
                self._collection, limit=size, offset=after, with_payload=True, with_vectors=True
            )
            if points:
                yield self._batch(points, after)
            if after is None:
                return
            after = after if isinstance(after, int) else str(after)

    def _batch(self, points: list[Any], after: Any) -> Batch:
        described = [self._wanted.described(point.payload or {}) for point in points]
        ids = [
            (point.payload or {}).get(self._wanted.id, point.id) if self._wanted.id else point.id for point in points
        ]
        cursor = as_json(after)
        if not any(isinstance(point.vector, Mapping) for point in points):
            version = self._wanted.vector("")[1]
            rows = [(i, point.vector, about) for i, point, about in zip(ids, points, described, strict=True)]
            return batch_of(rows, version, cursor)
        asked = self._wanted.vectors or {
            name: self._wanted.version for point in points[:1] for name in list(point.vector or {})[:1]
        }
        columns = []
        for name, version in asked.items():
            held = [n for n, point in enumerate(points) if name in (point.vector or {})]
            if held:
                vectors = np.array([points[n].vector[name] for n in held], np.float32)
                columns.append(Column(version, np.array(held), vectors))
        bare = len(points) - len({n for column in columns for n in column.rows.tolist()})
        return Batch(len(points), list(map(str, ids)), described, columns, cursor, {"no vector": bare} if bare else {})
