"""A document store and a retriever for Haystack (haystack-ai) that use a gallery, as replacements of others.

    from regraft.integrations.haystack import RegraftDocumentStore, RegraftEmbeddingRetriever

    store = RegraftDocumentStore(gallery="docs", version="minilm-v1", embedding_dim=384)

A saved pipeline names this module: `Pipeline.load(..., allowed_modules=["regraft.integrations.haystack"])`.

For a newer embedding model, create a second store of the same gallery with the new model's version: once an edge
connects the two versions and the new one is deployed, it finds the documents of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any, Self

import numpy as np
from haystack import Document, component, default_from_dict, default_to_dict
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.types import DuplicatePolicy, FilterPolicy, apply_filter_policy
from haystack.errors import FilterError
from haystack.utils import Secret

from index.errors import InvalidArgument
from regraft.client import Client
from regraft.integrations.conditions import (
    Condition,
    UnsupportedFilter,
    both,
    either,
    equals,
    is_null,
    negated,
    nothing,
    one_of,
    present,
    within,
)
from regraft.integrations.documents import Documents, Vector
from regraft.models import ItemInfo, Match

Filters = dict[str, Any]
WITHOUT = "_without_embedding"
"""Metadata field that marks a document without an embedding: it is stored with a placeholder and never retrieved."""
BOUNDS = {">": "gt", ">=": "gte", "<": "lt", "<=": "lte"}
OWN = {field.name for field in fields(Document)} - {"meta"}


class RegraftDocumentStore:
    """Documents of a gallery. Haystack's filters are evaluated by the service, see docs/filters.md.

    Documents without an embedding are stored but not retrieved by embedding. Vectors of a version with a cosine space
    are returned as unit vectors. Blobs and sparse embeddings are refused.

    Args:
        gallery: name of the gallery.
        version: the version of the embeddings.
        url, api_key: the service and its key; by default REGRAFT_URL and REGRAFT_API_KEY.
        content_key: the metadata field with the content of an item that is not a text, such as an imported one.
        create: on first use create the gallery and register and deploy the version, without an encoder, if missing.
        embedding_dim: dimension of a version to create; by default that of the first embedding.
        return_embedding: whether documents are returned with their embeddings.
    """

    def __init__(
        self,
        gallery: str,
        version: str,
        *,
        url: str | None = None,
        api_key: Secret | None = None,
        content_key: str = "content",
        create: bool = True,
        embedding_dim: int | None = None,
        return_embedding: bool = False,
    ) -> None:
        self._given: dict[str, Any] = {
            "gallery": gallery,
            "version": version,
            "url": url,
            "content_key": content_key,
            "create": create,
            "embedding_dim": embedding_dim,
            "return_embedding": return_embedding,
        }
        self._api_key = api_key
        self._return_embedding = return_embedding
        client = Client(url, api_key.resolve_value() if api_key else None)
        self.documents = Documents(gallery, version, client, text_key=content_key, create=create, dim=embedding_dim)

    def to_dict(self) -> dict[str, Any]:
        """The argument of `from_dict` that recreates this store."""
        key = self._api_key.to_dict() if self._api_key else None
        described: dict[str, Any] = default_to_dict(self, **self._given, api_key=key)
        return described

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Create a store from the result of `to_dict`."""
        given = data["init_parameters"]
        if given.get("api_key"):
            given["api_key"] = Secret.from_dict(given["api_key"])
        made: Self = default_from_dict(cls, data)
        return made

    def count_documents(self) -> int:
        """The number of documents."""
        return self.documents.count()

    def filter_documents(self, filters: Filters | None = None) -> list[Document]:
        """All documents that pass the filters. Raises FilterError."""
        return self._shown(self._matching(filters))

    def write_documents(self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE) -> int:
        """Store documents. Returns the number written.

        Raises:
            ValueError: not a list of documents.
            DuplicateDocumentError: an id exists, unless `policy` is OVERWRITE or SKIP.
            InvalidArgument: a document without content, with a blob or a sparse embedding.
        """
        if not isinstance(documents, list) or not all(isinstance(one, Document) for one in documents):
            raise ValueError("documents must be a list of Document")
        for one in documents:
            if one.blob is not None or one.sparse_embedding is not None or one.content is None:
                raise InvalidArgument(f"{one.id}: content is required; the store keeps content, meta and embedding")
        # Of documents with the same id the last is stored; with SKIP the first.
        new = {one.id: one for one in (reversed(documents) if policy is DuplicatePolicy.SKIP else documents)}
        if policy is not DuplicatePolicy.OVERWRITE:
            there = [key for key in self.documents.get(list(new)) if key in new]
            if policy is not DuplicatePolicy.SKIP and (there or len(new) < len(documents)):
                raise DuplicateDocumentError(f"{there[0]} already exists" if there else "an id is repeated in the list")
            new = {key: one for key, one in new.items() if key not in there}
        self._put(list(new.values()))
        return len(new)

    def delete_documents(self, document_ids: list[str]) -> None:
        """Delete documents; unknown ids are ignored."""
        self.documents.delete(document_ids)

    def delete_all_documents(self) -> None:
        """Delete all documents; the gallery is kept."""
        self.documents.delete_matching(None)

    def delete_by_filter(self, filters: Filters) -> int:
        """Delete all documents that pass the filters. Returns the number deleted."""
        return self.documents.delete_matching(as_filter(filters))

    def count_documents_by_filter(self, filters: Filters) -> int:
        """The number of documents that pass the filters."""
        return len(self._matching(filters))

    def update_by_filter(self, filters: Filters, meta: dict[str, Any]) -> int:
        """Update the metadata of all documents that pass the filters. Returns their number."""
        return self.documents.patch_metadata(
            {
                one.id: {field: _replacing(one.metadata.get(field), value) for field, value in meta.items()}
                for one in self._matching(filters)
            }
        )

    def embedding_retrieval(
        self,
        query_embedding: Vector,
        *,
        filters: Filters | None = None,
        top_k: int = 10,
        return_embedding: bool | None = None,
        **options: Any,
    ) -> list[Document]:
        """The documents nearest to an embedding of the version, with their scores; `options`: `QueryOptions`."""
        asked = as_filter(filters)
        condition = both([present(WITHOUT, False), *([asked] if asked else [])])
        found = self.documents.search(query_embedding, top_k, filter=condition, **options)
        return self._shown(found, return_embedding)

    def reembed(self, embed: Callable[[list[str]], Sequence[Vector]], limit: int | None = None) -> int:
        """Embed documents that have no vector of this version, at most `limit`; see `Documents.reembed`.

        Those that were written without an embedding stay so: write them again with one.
        """
        self.documents.prepare(len(embed(["a text"])[0]))
        return self.documents.reembed(embed, limit, leave_out=lambda item: bool(item.metadata.get(WITHOUT)))

    async def count_documents_async(self) -> int:
        """As `count_documents`."""
        return await asyncio.to_thread(self.count_documents)

    async def filter_documents_async(self, filters: Filters | None = None) -> list[Document]:
        """As `filter_documents`."""
        return await asyncio.to_thread(self.filter_documents, filters)

    async def write_documents_async(
        self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE
    ) -> int:
        """As `write_documents`."""
        return await asyncio.to_thread(self.write_documents, documents, policy)

    async def delete_documents_async(self, document_ids: list[str]) -> None:
        """As `delete_documents`."""
        await asyncio.to_thread(self.delete_documents, document_ids)

    async def delete_all_documents_async(self) -> None:
        """As `delete_all_documents`."""
        await asyncio.to_thread(self.delete_all_documents)

    async def delete_by_filter_async(self, filters: Filters) -> int:
        """As `delete_by_filter`."""
        return await asyncio.to_thread(self.delete_by_filter, filters)

    async def count_documents_by_filter_async(self, filters: Filters) -> int:
        """As `count_documents_by_filter`."""
        return await asyncio.to_thread(self.count_documents_by_filter, filters)

    async def update_by_filter_async(self, filters: Filters, meta: dict[str, Any]) -> int:
        """As `update_by_filter`."""
        return await asyncio.to_thread(self.update_by_filter, filters, meta)

    async def embedding_retrieval_async(self, query_embedding: Vector, **options: Any) -> list[Document]:
        """As `embedding_retrieval`."""
        return await asyncio.to_thread(self.embedding_retrieval, query_embedding, **options)

    def _matching(self, filters: Filters | None) -> list[ItemInfo]:
        return list(self.documents.filtered(as_filter(filters)))

    def _put(self, documents: Sequence[Document]) -> None:
        dim = next((len(one.embedding) for one in documents if one.embedding is not None), None)
        if documents and dim is None:
            dim = self.documents.dim()
        rows = np.zeros((len(documents), dim or 0), np.float32)
        about = []
        if odd := [one for one in documents if one.embedding is not None and len(one.embedding) != dim]:
            raise InvalidArgument(f"{odd[0].id}: the embedding has {len(odd[0].embedding or ())} numbers, not {dim}")
        for row, one in zip(rows, documents, strict=True):
            about.append(one.meta if one.embedding is not None else {**one.meta, WITHOUT: True})
            row[:] = one.embedding if one.embedding is not None else np.eye(1, len(row))[0]
        self.documents.put([one.id for one in documents], [one.content or "" for one in documents], about, rows)

    def _shown(self, found: Sequence[Match | ItemInfo], embeddings: bool | None = None) -> list[Document]:
        wanted = self._return_embedding if embeddings is None else embeddings
        held = self.documents.get([one.id for one in found]) if wanted else {}
        shown = []
        for one in found:
            content, meta = self.documents.text_and_metadata(one)
            mine = [] if meta.pop(WITHOUT, False) or one.id not in held else held[one.id].embeddings
            vector = next((x.embedding for x in mine if x.version == self.documents.version), None)
            score = one.score if isinstance(one, Match) else None
            shown.append(Document(id=one.id, content=content, meta=meta, score=score, embedding=vector))
        return shown


@component
class RegraftEmbeddingRetriever:
    """Retrieves documents of a `RegraftDocumentStore` by an embedding.

    Args:
        document_store: the store.
        filters: the filters of every run; `filter_policy` defines how those of a run are combined with them.
        top_k: largest number of documents.
        return_embedding: whether they are returned with their embeddings; by default as set in the store.
    """

    def __init__(
        self,
        document_store: RegraftDocumentStore,
        *,
        filters: Filters | None = None,
        top_k: int = 10,
        return_embedding: bool | None = None,
        filter_policy: str | FilterPolicy = FilterPolicy.REPLACE,
    ) -> None:
        if not isinstance(document_store, RegraftDocumentStore):
            raise TypeError("document_store must be a RegraftDocumentStore")
        self.document_store, self.filters, self.top_k = document_store, filters, top_k
        self.return_embedding = return_embedding
        self.filter_policy = FilterPolicy.from_str(str(filter_policy))

    def to_dict(self) -> dict[str, Any]:
        """The argument of `from_dict` that recreates this retriever."""
        described: dict[str, Any] = default_to_dict(
            self,
            document_store=self.document_store.to_dict(),
            filters=self.filters,
            top_k=self.top_k,
            return_embedding=self.return_embedding,
            filter_policy=self.filter_policy.value,
        )
        return described

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Create a retriever from the result of `to_dict`."""
        given = data["init_parameters"]
        if isinstance(given["document_store"], dict):
            given["document_store"] = RegraftDocumentStore.from_dict(given["document_store"])
        made: Self = default_from_dict(cls, data)
        return made

    @component.output_types(documents=list[Document])
    def run(
        self, query_embedding: list[float], filters: Filters | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """`documents`: the documents nearest to the embedding, best first."""
        return {"documents": self.document_store.embedding_retrieval(query_embedding, **self._options(filters, top_k))}

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query_embedding: list[float], filters: Filters | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """As `run`."""
        options = self._options(filters, top_k)
        return {"documents": await self.document_store.embedding_retrieval_async(query_embedding, **options)}

    def _options(self, filters: Filters | None, top_k: int | None) -> dict[str, Any]:
        asked = apply_filter_policy(self.filter_policy, self.filters, filters)
        return {"filters": asked, "top_k": top_k or self.top_k, "return_embedding": self.return_embedding}


def _replacing(old: Any, new: Any) -> Any:
    """The JSON Merge Patch after which a field is `new`: without it, an object would be merged into `old`."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    kept = {field: _replacing(old.get(field), value) for field, value in new.items()}
    return {**{field: None for field in old if field not in new}, **kept}


def as_filter(filters: Filters | None) -> Condition | None:
    """Convert Haystack's filters to a filter of docs/filters.md.

    Raises:
        FilterError: an invalid filter, or one without counterpart, such as fields of a document outside its metadata.
    """
    if not filters:
        return None
    try:
        return _logical(filters) if "conditions" in filters else _comparison(filters)
    except UnsupportedFilter as error:
        raise FilterError(str(error)) from error


def _logical(filters: Filters) -> Condition:
    joined: dict[str, Callable[[Sequence[Condition]], Condition]] = {
        "AND": both,
        "OR": either,
        "NOT": lambda parts: negated(both(parts)),
    }
    if filters.get("operator") not in joined or not filters["conditions"]:
        raise FilterError(
            f"the operator of joined conditions must be one of {', '.join(joined)}, not {filters.get('operator')!r}"
        )
    return joined[filters["operator"]]([as_filter(one) or {} for one in filters["conditions"]])


def _comparison(condition: Filters) -> Condition:
    if missing := [part for part in ("field", "operator", "value") if part not in condition]:
        raise FilterError(f"a condition must have field, operator and value: {missing[0]} is missing in {condition}")
    field, operator, value = _field(condition["field"]), condition["operator"], condition["value"]
    if operator in ("==", "!="):
        equal = is_null(field) if value is None else equals(field, value)
        return equal if operator == "==" else negated(equal)
    if operator in ("in", "not in"):
        if not isinstance(value, list):
            raise FilterError(f"{field}: {operator!r} requires a list, not {value!r}")
        return _among(field, value) if operator == "in" else negated(_among(field, value))
    if operator not in BOUNDS:
        raise FilterError(f"{field}: unknown operator {operator!r}; legal: ==, !=, in, not in, {', '.join(BOUNDS)}")
    return _range(field, operator, value)


def _among(field: str, values: Sequence[Any]) -> Condition:
    """A value of the field is one of these; None stands for null or a missing field, as with `==`."""
    among = one_of(field, [value for value in values if value is not None])
    return either([among, is_null(field)]) if None in values else among


def _range(field: str, operator: str, bound: Any) -> Condition:
    if bound is None:
        return nothing(field)
    if isinstance(bound, str):
        try:
            datetime.fromisoformat(bound)
        except ValueError as error:
            raise FilterError(f"{field}: {operator} requires a number or an ISO date, not {bound!r}") from error
    return within(field, **{BOUNDS[operator]: bound})


def _field(name: str) -> str:
    if name in OWN:
        raise FilterError(f"the service can only filter by meta, not by {name!r}")
    return name.removeprefix("meta.")
