"""A collection of Qdrant, on a server or in a folder (its local mode), scrolled by its own client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qdrant_client import QdrantClient

from index.errors import InvalidArgument
from regraft.sources.base import Batch, Wanted, as_json, batch_of_columns, place_of


class QdrantCollection:
    """Points of a collection; `after` is the point to go on with. Named vectors are columns."""

    def __init__(self, address: str, collection: str, wanted: Wanted, key: str | None) -> None:
        self._identity = f"qdrant {place_of(address)} {collection}"
        self._client = QdrantClient(url=address, api_key=key) if "://" in address else QdrantClient(path=address)
        self._collection, self._wanted = collection, wanted
        self._asked = self._named_vectors()

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def count(self) -> int:
        return int(self._client.count(self._collection).count)

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        while True:
            first = after is None
            points, after = self._client.scroll(
                self._collection, limit=size, offset=after, with_payload=True, with_vectors=True
            )
            if points:
                yield self._batch(points, after, first=first)
            if after is None:
                return
            after = after if isinstance(after, int) else str(after)

    def _named_vectors(self) -> Mapping[str, str | None]:
        """Vectors asked for, with their versions, else the collection's first; one without a name is called "".

        Asked of the collection, not of a point, which may lack any of them.
        """
        named = self._client.get_collection(self._collection).config.params.vectors
        if not isinstance(named, Mapping):
            return {"": self._wanted.vector("")[1]}
        if unknown := [name for name in self._wanted.vectors if name not in named]:
            legal = ", ".join(named) or "none"
            raise InvalidArgument(f"{self._collection} has no vector {unknown[0]!r}; it has {legal}", pointer="/vector")
        return self._wanted.vectors or dict.fromkeys(list(named)[:1], self._wanted.version)

    def _batch(self, points: list[Any], after: Any, *, first: bool) -> Batch:
        about = [point.payload or {} for point in points]
        held = [point.vector if isinstance(point.vector, Mapping) else {"": point.vector} for point in points]
        return batch_of_columns(
            [one.get(self._wanted.id, point.id) for one, point in zip(about, points, strict=True)],
            list(map(self._wanted.described, about)),
            [(version, [one.get(name) for one in held]) for name, version in self._asked.items()],
            as_json(after),
            self._wanted.said(about, first=first),
        )
