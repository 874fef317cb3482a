"""`QdrantCollection`: a collection of Qdrant, on a server or in a folder (local mode), scrolled by Qdrant's client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qdrant_client import QdrantClient

from regraft.sources.base import Batch, Wanted, as_json, batch_of_columns, display_address


class QdrantCollection:
    """Points of a collection; `after` is the next point. Named vectors are columns."""

    def __init__(self, address: str, collection: str, wanted: Wanted, key: str | None) -> None:
        self._identity = f"qdrant {display_address(address)} {collection}"
        self._client = _client(address, key)
        self._collection, self._wanted = collection, wanted
        # From the collection, because a point may lack some of its vectors.
        self._configured = self._client.get_collection(collection).config.params.vectors
        self._asked = self._named_vectors()

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def count(self) -> int:
        return int(self._client.count(self._collection).count)

    @property
    def metrics(self) -> Mapping[str | None, str]:
        there = self._configured if isinstance(self._configured, Mapping) else {"": self._configured}
        words = {version: getattr(there.get(name), "distance", None) for name, version in self._asked.items()}
        return {version: str(getattr(word, "value", word)) for version, word in words.items() if word is not None}

    @property
    def fields(self) -> None:
        return None  # each point has its own payload

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
        """Name -> version of the wanted vectors, by default the first; the name of an unnamed one is ""."""
        if not isinstance(self._configured, Mapping):
            return {"": self._wanted.vector("")[1]}
        return self._wanted.named_vectors(self._configured, self._collection)

    def _batch(self, points: list[Any], after: Any, *, first: bool) -> Batch:
        about = [point.payload or {} for point in points]
        if first:
            self._wanted.check_first(about)
        held = [point.vector if isinstance(point.vector, Mapping) else {"": point.vector} for point in points]
        return batch_of_columns(
            self._wanted.ids_of(about, [point.id for point in points]),
            list(map(self._wanted.metadata_of, about)),
            [(version, [one.get(name) for one in held]) for name, version in self._asked.items()],
            as_json(after),
            self._wanted.texts_of(about),
        )


def _client(address: str, key: str | None) -> Any:
    if "://" not in address:
        return QdrantClient(path=address)
    # The client's check of releases would print a warning if the server is unreachable, before the error.
    return QdrantClient(url=address, api_key=key, check_compatibility=False)
