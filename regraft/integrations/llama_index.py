"""A vector store for LlamaIndex (llama-index-core) that uses a gallery, as a replacement of others.

    from regraft.integrations.llama_index import RegraftVectorStore

    store = RegraftVectorStore(gallery="docs", version="minilm-v1")
    index = VectorStoreIndex.from_documents(documents, storage_context=StorageContext.from_defaults(vector_store=store))

For a newer embedding model, create a second store of the same gallery with the new model's version: once an edge
connects the two versions and the new one is deployed, it finds the nodes of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TextNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from index.errors import InvalidArgument
from regraft.client import Client
from regraft.integrations.conditions import (
    Condition,
    UnsupportedFilter,
    both,
    bounded,
    differs,
    either,
    equals,
    negated,
    none_of,
    one_of,
)
from regraft.integrations.documents import Documents
from regraft.models import EmbeddedItem, ItemInfo, Match

NODE_ID, DOC_ID = "_node_id", "doc_id"
"""Metadata fields added to those of a node: its id, which filters could not test otherwise, and its document's."""
CONTENT = "_node_content"
"""Metadata field in which LlamaIndex's stores keep a node."""
LAMBDA, PREFETCH = 0.5, 4
"""Defaults of maximal marginal relevance: the weight of similarity, and the number of candidates as a factor of k."""
OPERATORS: dict[FilterOperator, Callable[[str, Any], Condition]] = {
    FilterOperator.EQ: equals,
    FilterOperator.NE: differs,
    FilterOperator.GT: bounded("gt"),
    FilterOperator.GTE: bounded("gte"),
    FilterOperator.LT: bounded("lt"),
    FilterOperator.LTE: bounded("lte"),
    FilterOperator.IN: one_of,
    FilterOperator.NIN: none_of,
    FilterOperator.ANY: one_of,
    FilterOperator.ALL: lambda field, values: both([equals(field, value) for value in values]),
    FilterOperator.CONTAINS: equals,
}
"""Conditions on arrays test their elements (docs/filters.md), so `any` and `contains` are `in` and `eq`."""


class RegraftVectorStore(BasePydanticVectorStore):
    """Nodes of a gallery, with their texts. See `regraft.integrations.documents.Documents` for the fields.

    Similarities are the service's scores, such as cosines, or 1 / (1 + d) for a distance d; higher is better. Supports
    the query modes `default` and `mmr`.
    """

    stores_text: bool = True
    flat_metadata: bool = False
    gallery: str
    version: str
    url: str | None = None
    text_key: str = "text"
    create: bool = True
    dim: int | None = None
    space: dict[str, Any] | None = None
    _documents: Documents = PrivateAttr()
    modes: ClassVar = (VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR)

    def __init__(
        self, gallery: str, version: str, *, api_key: str | None = None, client: Client | None = None, **fields: Any
    ) -> None:
        super().__init__(gallery=gallery, version=version, **fields)
        self._documents = Documents(
            gallery,
            version,
            client or Client(self.url, api_key),
            text_key=self.text_key,
            create=self.create,
            dim=self.dim,
            space=self.space,
        )

    @classmethod
    def class_name(cls) -> str:
        return "RegraftVectorStore"

    @property
    def client(self) -> Client:
        """The client of the service."""
        return self._documents.client

    def add(self, nodes: Sequence[BaseNode], **_: Any) -> list[str]:
        """Store nodes with their embeddings, replacing those with the same ids. Returns their ids."""
        ids = [node.node_id for node in nodes]
        texts = [node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes]
        about = [
            {**node_to_metadata_dict(node, remove_text=True, flat_metadata=False), NODE_ID: node.node_id}
            for node in nodes
        ]
        self._documents.put(ids, texts, about, [node.get_embedding() for node in nodes])
        return ids

    def reembed(self, model: BaseEmbedding, limit: int | None = None) -> int:
        """Embed nodes that have no vector of this version, at most `limit`; see `Documents.reembed`."""
        self._documents.prepare(len(model.get_text_embedding("a text")))
        return self._documents.reembed(model.get_text_embedding_batch, limit, self._text)

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        """Delete all nodes of a document."""
        self._documents.delete_matching(equals(DOC_ID, ref_doc_id))

    def delete_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **_: Any) -> None:
        """Delete the nodes of these ids that pass the filters. Raises InvalidArgument without either."""
        condition = _asked(None, None, filters)
        if node_ids is not None:
            self._documents.delete([item.id for item in self._found(node_ids, filters)])
        elif condition is not None:
            self._documents.delete_matching(condition)
        else:
            raise InvalidArgument("node_ids or filters are required; to delete all nodes, use clear()")

    def clear(self) -> None:
        """Delete all nodes."""
        self._documents.delete_matching(None)

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """The nodes of these ids that pass the filters."""
        return [self._node(item) for item in self._found(node_ids, filters)]

    def query(self, query: VectorStoreQuery, **options: Any) -> VectorStoreQueryResult:
        """The nodes nearest to an embedding of the version, best first.

        `options`: those of `QueryOptions`, and for mmr `mmr_threshold`, unless the query has one, and the number of
        candidates: `mmr_prefetch_k`, or `mmr_prefetch_factor` for each result.

        Raises:
            InvalidArgument: another mode, or no embedding.
            UnsupportedFilter: an operator without counterpart.
        """
        if query.mode not in self.modes or query.query_embedding is None:
            legal = ", ".join(mode.value for mode in self.modes)
            raise InvalidArgument(f"the query mode must be one of {legal}, with an embedding, not {query.mode.value}")
        diverse = query.mode is VectorStoreQueryMode.MMR
        k = query.similarity_top_k
        looked_at = k
        if diverse:
            # A retriever passes on only its `vector_store_kwargs`.
            weight = options.pop("mmr_threshold", LAMBDA) if query.mmr_threshold is None else query.mmr_threshold
            factor = options.pop("mmr_prefetch_factor", PREFETCH)
            looked_at = options.pop("mmr_prefetch_k", int(factor * k))
        condition = _asked(query.node_ids or None, query.doc_ids or None, query.filters)
        matches = self._documents.search(query.query_embedding, looked_at, filter=condition, **options)
        if diverse:
            matches = self._documents.max_marginal_relevance(matches, k, weight)
        return VectorStoreQueryResult(
            nodes=[self._node(match) for match in matches],
            similarities=[match.score for match in matches],
            ids=[match.id for match in matches],
        )

    async def async_add(self, nodes: Sequence[BaseNode], **options: Any) -> list[str]:
        return await asyncio.to_thread(self.add, nodes, **options)

    async def adelete(self, ref_doc_id: str, **options: Any) -> None:
        await asyncio.to_thread(self.delete, ref_doc_id, **options)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **options: Any
    ) -> None:
        await asyncio.to_thread(self.delete_nodes, node_ids, filters, **options)

    async def aclear(self) -> None:
        await asyncio.to_thread(self.clear)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    async def aquery(self, query: VectorStoreQuery, **options: Any) -> VectorStoreQueryResult:
        return await asyncio.to_thread(self.query, query, **options)

    def _found(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> Iterable[ItemInfo]:
        """The items with these ids (None: any) that pass the filters (None: all do)."""
        condition = _asked(None, None, filters)
        if node_ids is None:
            return self._documents.filtered(condition)
        if condition is None:
            return self._documents.get(node_ids).values()
        named = set(node_ids)
        return (item for item in self._documents.filtered(condition) if item.id in named)

    def _text(self, item: EmbeddedItem) -> str | None:
        """The text of a node, also of one from another store of LlamaIndex; None: it has none."""
        text = self._documents.text_of(item)
        if text is None and CONTENT in item.metadata:
            return str(self._node(item).get_content(metadata_mode=MetadataMode.NONE))
        return text

    def _node(self, item: Match | ItemInfo) -> BaseNode:
        """The node of an item, as stored by this or another store of LlamaIndex; else one made of the item."""
        text, own = self._documents.text_and_metadata(item)
        if CONTENT not in own:
            return TextNode(id_=item.id, text=text, metadata=own)
        return metadata_dict_to_node(own, text=text or None)  # other stores keep the text in CONTENT


def as_filter(filters: MetadataFilters) -> Condition:
    """Convert LlamaIndex's filters to a filter of docs/filters.md.

    Raises:
        UnsupportedFilter: text_match, text_match_insensitive or is_empty, or a value that no JSON value equals.
    """
    parts = [as_filter(one) if isinstance(one, MetadataFilters) else _condition(one) for one in filters.filters]
    if not parts:
        raise UnsupportedFilter("filters must have at least one filter: omit them")
    if filters.condition is FilterCondition.NOT:
        return negated(both(parts))
    return either(parts) if filters.condition is FilterCondition.OR else both(parts)


def _condition(one: MetadataFilter) -> Condition:
    if one.operator not in OPERATORS:
        legal = ", ".join(operator.value for operator in OPERATORS)
        raise UnsupportedFilter(f"{one.key}: unsupported operator {one.operator.value!r}; legal: {legal}")
    return OPERATORS[one.operator](one.key, one.value)


def _asked(
    node_ids: Sequence[str] | None, doc_ids: Sequence[str] | None, filters: MetadataFilters | None
) -> Condition | None:
    parts = [one_of(name, list(ids)) for name, ids in ((NODE_ID, node_ids), (DOC_ID, doc_ids)) if ids is not None]
    if filters is not None and filters.filters:
        parts.append(as_filter(filters))
    return both(parts) if parts else None
