"""`ChromaCollection`: a collection of Chroma, in a folder or on a server, read page by page by Chroma's client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import chromadb

from regraft.sources.base import Batch, Wanted, batch_of, display_address


class ChromaCollection:
    """Records of a collection; `after` is the number of records read. Documents become the field `document`."""

    def __init__(self, address: str, collection: str, wanted: Wanted) -> None:
        self._identity, self._wanted = f"chroma {display_address(address)} {collection}", wanted
        if "://" in address:
            server = urlsplit(address)
            client = chromadb.HttpClient(server.hostname or "", server.port or 8000, ssl=server.scheme == "https")
        else:
            client = chromadb.PersistentClient(address)
        self._collection = client.get_collection(collection)

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def count(self) -> int:
        return int(self._collection.count())

    @property
    def metrics(self) -> Mapping[str | None, str]:
        configured = getattr(self._collection, "configuration_json", None) or {}
        word = next((about.get("space") for about in configured.values() if isinstance(about, Mapping)), None)
        word = (self._collection.metadata or {}).get("hnsw:space", word)
        return {} if word is None else {self._wanted.vector("embedding")[1]: str(word)}

    @property
    def fields(self) -> None:
        return None  # each record has its own metadata

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        _, version = self._wanted.vector("embedding")
        at = int(after or 0)
        while True:
            page = self._collection.get(limit=size, offset=at, include=["embeddings", "metadatas", "documents"])
            ids = page["ids"]
            if not ids:
                return
            nothing = [None] * len(ids)
            documents, metadatas = page["documents"] or nothing, page["metadatas"] or nothing
            vectors = nothing if page["embeddings"] is None else page["embeddings"]
            named = [{} if text is None else {"document": text} for text in documents]
            about = [{**(one or {}), **text} for one, text in zip(metadatas, named, strict=True)]
            if at == 0:
                self._wanted.check_first(about)
            at += len(ids)
            rows = zip(ids, vectors, map(self._wanted.metadata_of, about), strict=True)
            yield batch_of(list(rows), version, at, self._wanted.texts_of(about))
