"""`WeaviateCollection`: a collection of Weaviate, read by the cursor of its REST API (GET /v1/objects)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from index.errors import InvalidArgument
from regraft.sources.base import Batch, Wanted, batch_of_columns, display_address
from regraft.sources.rest import Rest

NAME = re.compile(r"[A-Z][_0-9A-Za-z]*")
"""Legal names of collections; the name is inserted into a query."""
UNNAMED = ""


class WeaviateCollection:
    """Objects of a collection in the order of their UUIDs; `after` is the last one read. Named vectors are columns."""

    def __init__(self, address: str, collection: str, wanted: Wanted, key: str | None) -> None:
        if not NAME.fullmatch(collection):
            raise InvalidArgument(f"a Weaviate collection must begin with a capital letter, not {collection!r}")
        self._identity, self._wanted = f"weaviate {display_address(address)} {collection}", wanted
        self._rest = Rest("Weaviate", address, {"Authorization": f"Bearer {key}"} if key else {})
        self._collection = collection
        self._schema = self._rest.ask("GET", f"/v1/schema/{collection}")
        self._asked = self._named_vectors()

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def count(self) -> int:
        query = f"{{Aggregate{{{self._collection}{{meta{{count}}}}}}}}"
        answer = self._rest.ask("POST", "/v1/graphql", json={"query": query})
        return int(answer["data"]["Aggregate"][self._collection][0]["meta"]["count"])

    @property
    def metrics(self) -> Mapping[str | None, str]:
        there = self._schema.get("vectorConfig") or {UNNAMED: self._schema}
        words = {
            version: (there[name].get("vectorIndexConfig") or {}).get("distance")
            for name, version in self._asked.items()
        }
        return {version: str(word) for version, word in words.items() if word is not None}

    @property
    def fields(self) -> Sequence[str]:
        return [str(one["name"]) for one in self._schema.get("properties") or ()]

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        while True:
            asked = {"class": self._collection, "limit": size, "include": "vector", "after": after or ""}
            found = self._rest.ask("GET", "/v1/objects", params=asked)["objects"]
            if not found:
                return
            first, after = after is None, found[-1]["id"]
            yield self._batch(found, after, first=first)

    def _named_vectors(self) -> Mapping[str, str | None]:
        """Name -> version of the wanted vectors, by default the first; the name of an unnamed one is ""."""
        named = self._schema.get("vectorConfig") or {}
        if not named:
            return {UNNAMED: self._wanted.vector(UNNAMED)[1]}
        return self._wanted.named_vectors(named, self._collection)

    def _batch(self, found: list[Any], after: str, *, first: bool) -> Batch:
        about = [one.get("properties") or {} for one in found]
        if first:
            self._wanted.check_first(about)
        held = [{UNNAMED: one.get("vector"), **(one.get("vectors") or {})} for one in found]
        return batch_of_columns(
            self._wanted.ids_of(about, [one["id"] for one in found]),
            list(map(self._wanted.metadata_of, about)),
            [(version, [one.get(name) or None for one in held]) for name, version in self._asked.items()],
            after,
            self._wanted.texts_of(about),
        )
