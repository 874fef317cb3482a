"""The vector store of LlamaIndex: what its own stores test, filters, an index over it, and an upgrade of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("llama_index.core", reason="needs regraft[llama-index]")

from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from llama_index.core.vector_stores.utils import node_to_metadata_dict

from index.errors import InvalidArgument
from regraft.integrations.conditions import UnsupportedFilter
from regraft.integrations.llama_index import RegraftVectorStore, as_filter
from staging.inputs.embedding_models import TEXTS


class Fake(BaseEmbedding):
    """A model of the tests as LlamaIndex has them."""

    model: Callable[[str], list[float]]

    def _get_text_embedding(self, text):
        return self.model(text)

    def _get_query_embedding(self, query):
        return self.model(query)

    async def _aget_query_embedding(self, query):
        return self.model(query)


def node(number, model):
    """Node n<number> of document doc<number % 3>."""
    text = TEXTS[number]
    document = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc{number % 3}")}
    about = {"n": number, "animal": text.split()[0], "tags": text.split()[1:]}
    return TextNode(
        id_=f"n{number}", text=text, metadata=about, embedding=model(text), relationships=document,
        excluded_embed_metadata_keys=["tags"],
    )  # fmt: skip


@pytest.fixture
def store(client, name, models):
    made = RegraftVectorStore(name, "old", client=client)
    made.add([node(number, models[0]) for number in range(len(TEXTS))])
    return made


def found(store, vector, **options):
    return store.query(VectorStoreQuery(query_embedding=vector, **options))


def test_it_is_a_store_of_theirs_and_gives_back_what_it_was_given(store, models):
    result = found(store, models[0](TEXTS[5]), similarity_top_k=2)

    assert isinstance(store, BasePydanticVectorStore)
    assert result.ids[0] == "n5"
    assert result.similarities[0] == pytest.approx(1.0, abs=1e-5)
    kept = result.nodes[0]
    assert (kept.text, kept.ref_doc_id, kept.metadata) == (TEXTS[5], "doc2", node(5, models[0]).metadata)
    assert kept.excluded_embed_metadata_keys == ["tags"]
    assert store.to_dict()["gallery"] == store.gallery


def test_nodes_are_written_again_deleted_by_document_id_and_filter_and_cleared(store, models):
    def ids():
        return {one.node_id for one in store.get_nodes()}

    changed = node(0, models[0])
    changed.text = "other"
    store.add([changed])
    assert [one.text for one in store.get_nodes(["n0", "nobody"])] == ["other"]

    store.delete("doc1")
    assert ids() == {f"n{n}" for n in range(len(TEXTS)) if n % 3 != 1}
    store.delete_nodes(["n0", "n3"], MetadataFilters(filters=[MetadataFilter(key="n", value=3)]))
    assert "n0" in ids()
    assert "n3" not in ids()
    with pytest.raises(InvalidArgument):
        store.delete_nodes()
    with pytest.raises(InvalidArgument):
        store.delete_nodes(filters=MetadataFilters(filters=[]))
    store.delete_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="n", value=5)]))
    assert "n5" not in ids()
    store.clear()
    assert ids() == set()


def test_nodes_that_another_store_held_and_items_that_were_none_come_back(store, client, models, name):
    held = node(7, models[0])
    held.id_ = "moved"
    payload = node_to_metadata_dict(held, remove_text=False, flat_metadata=False)  # as its store of Qdrant does
    items = [("moved", payload), ("plain", {"text": "a text", "n": 1})]
    client.ingest_embeddings(name, [{"id": k, "metadata": m, "embedding": np.array(held.embedding)} for k, m in items])

    moved, plain = store.get_nodes(["moved", "plain"])

    assert (moved.node_id, moved.text, moved.metadata, moved.ref_doc_id) == ("moved", TEXTS[7], held.metadata, "doc1")
    assert (plain.node_id, plain.text, plain.metadata) == ("plain", "a text", {"n": 1})
    assert set(found(store, held.embedding, similarity_top_k=3).ids) == {"n7", "moved", "plain"}
    assert [one.node_id for one in store.get_nodes(["n1", "plain"], only("==", 1))] == ["n1", "plain"]
    seen = []
    RegraftVectorStore(name, "seen", client=client).reembed(
        Fake(model=lambda text: [float(len(seen.append(text) or text))])
    )
    assert "" not in seen
    store.delete_nodes(["moved", *map(str, range(10_001))])
    store.delete("doc1")
    assert "moved" not in {one.node_id for one in store.get_nodes()}


def test_everything_runs_asynchronously_too(store, models):
    async def all_of_it():
        await store.adelete("doc1")
        await store.async_add([node(1, models[0])])
        await store.adelete_nodes(["n3"])
        result = await store.aquery(VectorStoreQuery(query_embedding=models[0](TEXTS[1])))
        left = len(await store.aget_nodes())
        await store.aclear()
        return result.ids, left

    assert asyncio.run(all_of_it()) == (["n1"], 48)


def only(operator, value, key="n"):
    return MetadataFilters(filters=[MetadataFilter(key=key, value=value, operator=operator)])


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        (only("==", 3), lambda n: n == 3),
        (only("!=", 3), lambda n: n != 3),
        (only(">", 60), lambda n: n > 60),
        (only(">=", 60), lambda n: n >= 60),
        (only("<", 2), lambda n: n < 2),
        (only("<=", 2), lambda n: n <= 2),
        (only("in", [1, 2]), lambda n: n in (1, 2)),
        (only("nin", [1, 2]), lambda n: n not in (1, 2)),
        (only("any", ["runs", "eats"], "tags"), lambda n: TEXTS[n].split()[1] in ("runs", "eats")),
        (only("all", ["runs", "away"], "tags"), lambda n: TEXTS[n].endswith("runs away")),
        (only("contains", "away", "tags"), lambda n: TEXTS[n].endswith("away")),
        (MetadataFilters(filters=[only(">", 2), only("<", 5)]), lambda n: 2 < n < 5),
        (MetadataFilters(filters=[only("==", 2), only("==", 5)], condition="or"), lambda n: n in (2, 5)),
        (MetadataFilters(filters=[only("==", 2), only("<", 5)], condition="not"), lambda n: n != 2),
    ],
)
def test_filters_pass_what_they_say(store, models, given, passes):
    result = found(store, models[0]("cat"), similarity_top_k=100, filters=given)

    assert set(result.ids) == {f"n{n}" for n in range(len(TEXTS)) if passes(n)}


@pytest.mark.parametrize("operator", ["text_match", "text_match_insensitive", "is_empty"])
def test_what_cannot_be_mapped_is_refused_by_name(operator):
    with pytest.raises(UnsupportedFilter, match=operator):
        as_filter(only(operator, "x"))


def test_queries_among_documents_and_nodes_diverse_ones_and_other_modes(store, models):
    vector = models[0](TEXTS[4])

    assert set(found(store, vector, similarity_top_k=100, doc_ids=["doc1"]).ids) == {f"n{n}" for n in range(1, 72, 3)}
    assert set(found(store, vector, similarity_top_k=100, node_ids=["n1", "n2"]).ids) == {"n1", "n2"}
    diverse = found(store, vector, similarity_top_k=3, mode=VectorStoreQueryMode.MMR, mmr_threshold=0.1)
    assert diverse.ids[0] == "n4"
    assert diverse.ids != found(store, vector, similarity_top_k=3).ids
    index = VectorStoreIndex.from_vector_store(store, embed_model=Fake(model=models[0]))
    for options in ({"mmr_threshold": 0.1}, {"mmr_threshold": 0.1, "mmr_prefetch_factor": 4}):
        retriever = index.as_retriever(similarity_top_k=3, vector_store_query_mode="mmr", vector_store_kwargs=options)
        assert [one.node_id for one in retriever.retrieve(TEXTS[4])] == diverse.ids
    with pytest.raises(InvalidArgument, match="hybrid"):
        found(store, vector, mode=VectorStoreQueryMode.HYBRID)


def test_a_newer_model_finds_what_the_older_one_stored(store, client, models, name):
    newer = RegraftVectorStore(name, "new", client=client)
    assert newer.reembed(Fake(model=models[1]), 48) == 48
    client.fit_edge("new", "old", "procrustes", gallery=name, replace=True)
    client.deploy(name, "new")
    context = StorageContext.from_defaults(vector_store=newer)
    index = VectorStoreIndex(
        [TextNode(id_="later", text="whale sings below")], embed_model=Fake(model=models[1]), storage_context=context
    )

    retrieved = index.as_retriever(similarity_top_k=1)

    assert retrieved.retrieve("ant hides away")[0].node_id == "n71"
    assert retrieved.retrieve("whale sings below")[0].node_id == "later"
    assert client.gallery(name).mix == {"old": 24, "new": 49}
