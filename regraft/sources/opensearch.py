"""`OpenSearchIndex`: an index of OpenSearch, read in the order of a field by `search_after` of its REST API."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from regraft.sources.base import NO_ID, Batch, Wanted, batch_of, display_address
from regraft.sources.rest import Rest

OWN_ID = "_id"
COMPLETE = ("true", "strict")
"""The values of `dynamic` with which a mapping names every field of its documents."""


class OpenSearchIndex:
    """Documents in the order of their ids, or of the field `id` and then their ids; `after` is the last one's place.

    The vector is a field of the source, by default `vector` or the only `knn_vector`. `key`: user:password.
    """

    def __init__(self, address: str, index: str, wanted: Wanted, key: str | None) -> None:
        self._identity, self._wanted = f"opensearch {display_address(address)} {index}", wanted
        user, _, password = (key or "").partition(":")
        self._rest = Rest("OpenSearch", address, {}, (user, password) if key else None)
        self._path = f"/{quote(index, safe='')}"
        # Several documents may have one value of a field: where a page ends among them, the next one continues there.
        self._order = [{name: "asc"} for name in (wanted.id, OWN_ID) if name]
        # Only documents with the field: one without it sorts as null, after which the search could not continue.
        self._named = {"exists": {"field": wanted.id}} if wanted.id else {"match_all": {}}
        # Of an alias, the mappings of all its indices. With `dynamic: false` or `runtime`, documents have other fields.
        mappings = [one["mappings"] for one in self._rest.ask("GET", f"{self._path}/_mapping").values()]
        self._fields: dict[str, Any] = {}
        for mapping in reversed(mappings):
            self._fields |= mapping.get("properties", {})
        self._complete = all(str(mapping.get("dynamic", True)).lower() in COMPLETE for mapping in mappings)
        # A vector is no metadata, unless it is asked for.
        self._vectors = [name for name, about in self._fields.items() if about.get("type") == "knn_vector"]
        # A field of another type may hold vectors as well, if it is named.
        named = [name for name in wanted.vectors if name in self._fields]
        self._vector, self._version = wanted.vector_of(named or self._vectors, index)

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def count(self) -> int:
        return int(self._rest.ask("GET", f"{self._path}/_count")["count"])

    @property
    def metrics(self) -> Mapping[str | None, str]:
        about = self._fields[self._vector]
        word = about.get("space_type") or about.get("method", {}).get("space_type")
        return {self._version: str(word)} if word else {}

    @property
    def fields(self) -> Collection[str] | None:
        return self._fields if self._complete else None

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        body = {"size": size, "query": self._named, "sort": self._order, "track_total_hits": False}
        while True:
            behind = {} if after is None else {"search_after": after}
            found = self._rest.ask("POST", f"{self._path}/_search", json=body | behind)["hits"]["hits"]
            if not found:
                break
            about = [hit["_source"] for hit in found]
            if after is None:
                self._wanted.check_first(about)
            after = found[-1]["sort"]
            yield batch_of([self._row(hit) for hit in found], self._version, after, self._wanted.texts_of(about))
        others = {"query": {"bool": {"must_not": self._named}}}
        if self._wanted.id and (unnamed := int(self._rest.ask("POST", f"{self._path}/_count", json=others)["count"])):
            yield Batch(unnamed, [], [], [], after, {NO_ID: unnamed})

    def _row(self, hit: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any] | None]:
        source = hit["_source"]
        key = source.get(self._wanted.id) if self._wanted.id else hit[OWN_ID]
        metadata = self._wanted.metadata_of(source, self._vector, *self._vectors, self._wanted.id or "")
        return key, source.get(self._vector), metadata
