"""A vector store for LangChain (langchain-core) that uses a gallery, as a replacement of others.

    from regraft.integrations.langchain import RegraftVectorStore

    store = RegraftVectorStore(embeddings, gallery="docs", version="minilm-v1")

For a newer embedding model, create a second store of the same gallery with the new model's version: once an edge
connects the two versions and the new one is deployed, it finds the documents of the first.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

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
    present,
    within,
)
from regraft.integrations.documents import Documents, Vector
from regraft.models import EmbeddedItem, Match

Filter = Mapping[str, Any]
OWN = ({"field", "eq"}, {"field", "in"}, {"field", "range"}, {"field", "prefix"}, {"field", "exists"})


def _between(field: str, bounds: Any) -> Condition:
    if not isinstance(bounds, Sequence) or len(bounds) != 2:
        raise UnsupportedFilter(f"{field}: $between requires two bounds, not {bounds!r}")
    return within(field, gte=bounds[0], lte=bounds[1])


OPERATORS: dict[str, Callable[[str, Any], Condition]] = {
    "$eq": equals,
    "$ne": differs,
    "$in": one_of,
    "$nin": none_of,
    **{f"${bound}": bounded(bound) for bound in ("gt", "gte", "lt", "lte")},
    "$between": _between,
    "$exists": lambda field, there: present(field, bool(there)),
}
"""Name of an operator in LangChain's stores -> condition."""


class RegraftVectorStore(VectorStore):
    """Documents of a gallery. Filters: docs/filters.md, `{"city": "Bern"}`, or `{"price": {"$lt": 5}, "$or": [...]}`.

    A document is a text item with its metadata. Scores are the service's, such as cosines, or 1 / (1 + d) for a
    distance d; higher is better. `search_options` are those of `QueryOptions`: `mode`, `threshold`, `strict`, `exact`.

    Args:
        embedding: the model of the version's vectors.
        gallery: name of the gallery.
        version: the version of the vectors.
        url, api_key: the service and its key, unless `client` is given; by default REGRAFT_URL and REGRAFT_API_KEY.
        client: a client of the service, which the store does not close.
        text_key: the metadata field with the text of an item that is not a text, such as an imported one.
        create: on first use create the gallery and register and deploy the version, without an encoder, if missing.
        space: space of a version to create, as in a card; by default cosine.
    """

    def __init__(
        self,
        embedding: Embeddings,
        *,
        gallery: str,
        version: str,
        url: str | None = None,
        api_key: str | None = None,
        client: Client | None = None,
        text_key: str = "text",
        create: bool = True,
        space: Mapping[str, Any] | None = None,
    ) -> None:
        self._embedding = embedding
        self.documents = Documents(
            gallery, version, client or Client(url, api_key), text_key=text_key, create=create, space=space
        )

    @property
    def embeddings(self) -> Embeddings:
        """The model of the version's vectors."""
        return self._embedding

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **options: Any,
    ) -> Self:
        """Create a store with these texts; `options`: those of the constructor."""
        store = cls(embedding, **options)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **_: Any,
    ) -> list[str]:
        """Embed and store texts, replacing those with the same ids. Returns the ids, by default generated ones."""
        listed = list(texts)
        about = metadatas or [{} for _ in listed]
        keys = [given or str(uuid.uuid4()) for given in (ids or [""] * len(listed))]
        if not len(listed) == len(about) == len(keys):
            raise InvalidArgument(
                f"{len(listed)} texts require as many metadatas and ids, not {len(about)} and {len(keys)}"
            )
        self.documents.put(keys, listed, about, self._embedding.embed_documents(listed) if listed else [])
        return keys

    def prepare(self) -> None:
        """Create the gallery and the version now; needed for a newer model's version before an edge is added."""
        self.documents.prepare(len(self._embedding.embed_query("a text")))

    def reembed(self, limit: int | None = None) -> int:
        """Embed documents that have no vector of this version, at most `limit`; see `Documents.reembed`."""
        self.prepare()
        return self.documents.reembed(self._embedding.embed_documents, limit)

    def delete(self, ids: list[str] | None = None, **_: Any) -> bool:
        """Delete documents by id; unknown ids are ignored. Raises InvalidArgument without ids."""
        if ids is None:
            raise InvalidArgument("ids are required; to delete all documents, use `regraft gallery delete`")
        self.documents.delete(ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents with these ids, in this order; unknown ids are skipped."""
        found = self.documents.get(ids)
        return [self._shown(found[key]) for key in ids if key in found]

    def similarity_search(
        self,
        query: str,
        k: int = 4,
        filter: Filter | None = None,  # noqa: A002
        **search_options: Any,
    ) -> list[Document]:
        """The k documents nearest to a text, best first."""
        return self.similarity_search_by_vector(self._embedding.embed_query(query), k, filter, **search_options)

    def similarity_search_with_score(
        self,
        query: str,
        k: int = 4,
        filter: Filter | None = None,  # noqa: A002
        **search_options: Any,
    ) -> list[tuple[Document, float]]:
        """The same, each with its score."""
        return self.similarity_search_with_score_by_vector(
            self._embedding.embed_query(query), k, filter, **search_options
        )

    def similarity_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        filter: Filter | None = None,  # noqa: A002
        **search_options: Any,
    ) -> list[Document]:
        """The k documents nearest to a vector of the version."""
        return [self._shown(match) for match in self._matches(embedding, k, filter, search_options)]

    def similarity_search_with_score_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        filter: Filter | None = None,  # noqa: A002
        **search_options: Any,
    ) -> list[tuple[Document, float]]:
        """The same, each with its score."""
        return [(self._shown(match), match.score) for match in self._matches(embedding, k, filter, search_options)]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,  # noqa: A002
        **search_options: Any,
    ) -> list[Document]:
        """K of the `fetch_k` documents nearest to a text by maximal marginal relevance."""
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, filter, **search_options)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,  # noqa: A002
        **search_options: Any,
    ) -> list[Document]:
        """The same for a vector of the version; see `Documents.max_marginal_relevance`."""
        matches = self._matches(embedding, fetch_k, filter, search_options)
        return [self._shown(match) for match in self.documents.max_marginal_relevance(matches, k, lambda_mult)]

    def _matches(
        self, vector: Vector, k: int, given: Filter | None, search_options: Mapping[str, Any]
    ) -> Sequence[Match]:
        return self.documents.search(vector, k, filter=as_filter(given), **search_options)

    def _similarity_search_with_relevance_scores(
        self,
        query: str,
        k: int = 4,
        filter: Filter | None = None,  # noqa: A002
        **search_options: Any,
    ) -> list[tuple[Document, float]]:
        """As `similarity_search_with_score`, with `Documents.relevance`, which depends on more than the score."""
        matches = self._matches(self._embedding.embed_query(query), k, filter, search_options)
        mode = search_options.get("mode")
        return [(self._shown(match), self.documents.relevance(match, mode)) for match in matches]

    async def _asimilarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **search_options: Any
    ) -> list[tuple[Document, float]]:
        return await asyncio.to_thread(self._similarity_search_with_relevance_scores, query, k, **search_options)

    def _shown(self, item: Match | EmbeddedItem) -> Document:
        text, own = self.documents.text_and_metadata(item)
        return Document(id=item.id, page_content=text, metadata=own)


def as_filter(given: Filter | None) -> Condition | None:
    """Convert a filter of LangChain's stores to one of docs/filters.md; returns such a filter unchanged.

    Raises:
        UnsupportedFilter: a callable, or an operator without counterpart, such as $like.
    """
    if not given and not callable(given):
        return None
    if not isinstance(given, Mapping):
        raise UnsupportedFilter(f"a filter must be a dictionary, not {type(given).__name__}: the service evaluates it")
    if set(given) in OWN or set(given) <= {"and", "or", "not"}:
        return dict(given)
    return both([_condition(name, value) for name, value in given.items()])


def _condition(name: str, value: Any) -> Condition:
    if name in ("$and", "$or"):
        if not isinstance(value, list) or not value:
            raise UnsupportedFilter(f"{name} requires a list of filters, not {value!r}")
        parts = [as_filter(one) or {} for one in value]
        return both(parts) if name == "$and" else either(parts)
    if name == "$not":
        return negated(as_filter(value) or {})
    if name.startswith("$"):
        raise UnsupportedFilter(f"unknown operator {name}; legal: $and, $or, $not")
    if not isinstance(value, Mapping):
        return equals(name, value)
    return both([_operator(name, operator, operand) for operator, operand in value.items()])


def _operator(field: str, operator: str, value: Any) -> Condition:
    if operator not in OPERATORS:
        raise UnsupportedFilter(
            f"{field}: unsupported operator {operator!r}; legal: {', '.join(OPERATORS)}, `prefix` of docs/filters.md"
        )
    return OPERATORS[operator](field, value)
