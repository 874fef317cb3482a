"""The document store of Haystack against Haystack's own suites, its retriever, and an upgrade of the model."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("haystack", reason="needs regraft[haystack]")

from haystack import Document, Pipeline
from haystack.dataclasses import ByteStream
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.types import DuplicatePolicy
from haystack.errors import FilterError
from haystack.testing.document_store import CountDocumentsByFilterTest, DocumentStoreBaseExtendedTests
from haystack.testing.document_store_async import (
    CountDocumentsAsyncTest,
    CountDocumentsByFilterAsyncTest,
    DeleteAllAsyncTest,
    DeleteByFilterAsyncTest,
    DeleteDocumentsAsyncTest,
    FilterDocumentsAsyncTest,
    UpdateByFilterAsyncTest,
    WriteDocumentsAsyncTest,
)
from haystack.utils import Secret

from index.errors import InvalidArgument
from regraft.client import Problem
from regraft.integrations.haystack import RegraftDocumentStore, RegraftEmbeddingRetriever, as_filter
from staging.inputs.embedding_models import TEXTS


class Standard:
    """What the suites share: a store of vectors of 768 numbers, and documents compared in no order, less embeddings."""

    @pytest.fixture
    def document_store(self, url, name):
        store = RegraftDocumentStore(name, "random-768", url=url, embedding_dim=768)
        yield store
        store.documents.client.close()

    @staticmethod
    def assert_documents_are_equal(received, expected):
        def plain(documents):
            return sorted((one.id, one.content, sorted(one.meta.items())) for one in documents)

        assert plain(received) == plain(expected)


class TestStore(Standard, DocumentStoreBaseExtendedTests, CountDocumentsByFilterTest):
    def test_write_documents(self, document_store):
        document_store.write_documents([Document(id="a", content="x")])
        with pytest.raises(DuplicateDocumentError):
            document_store.write_documents([Document(id="a", content="y")])

    def test_of_documents_with_one_id_the_first_is_kept_or_the_last_replaces_it(self, document_store):
        twice = [Document(id="a", content="first"), Document(id="a", content="last")]
        for policy, left in ((DuplicatePolicy.SKIP, "first"), (DuplicatePolicy.OVERWRITE, "last")):
            assert document_store.write_documents(twice, policy) == 1
            assert [one.content for one in document_store.filter_documents()] == [left]


class TestAsyncStore(
    Standard,
    CountDocumentsAsyncTest,
    CountDocumentsByFilterAsyncTest,
    DeleteAllAsyncTest,
    DeleteByFilterAsyncTest,
    DeleteDocumentsAsyncTest,
    FilterDocumentsAsyncTest,
    UpdateByFilterAsyncTest,
    WriteDocumentsAsyncTest,
):
    async def test_write_documents_async(self, document_store):
        assert await document_store.write_documents_async([Document(id="a", content="x")]) == 1


@pytest.fixture
def store(url, name, models):
    made = RegraftDocumentStore(name, "old", url=url)
    made.write_documents(
        [Document(id=f"d{n}", content=x, meta={"n": n}, embedding=models[0](x)) for n, x in enumerate(TEXTS)]
    )
    yield made
    made.documents.client.close()


def test_the_retriever_runs_in_a_pipeline_that_is_saved_and_loaded(store, models, monkeypatch):
    monkeypatch.setenv("REGRAFT_API_KEY", "none is asked for")
    store.write_documents([Document(id="bare", content="no embedding")])
    keyed = RegraftDocumentStore(**store._given, api_key=Secret.from_env_var("REGRAFT_API_KEY"))
    pipeline = Pipeline()
    pipeline.add_component("found", RegraftEmbeddingRetriever(keyed, top_k=3))
    loaded = Pipeline.loads(pipeline.dumps(), allowed_modules=["regraft.integrations.haystack"])
    filters = {"field": "meta.n", "operator": ">", "value": 5}
    keyed.documents.client.close()

    found = loaded.run({"found": {"query_embedding": models[0](TEXTS[9]), "filters": filters}})["found"]["documents"]

    loaded.get_component("found").document_store.documents.client.close()
    assert [found[0].id, found[0].content, round(found[0].score, 5)] == ["d9", TEXTS[9], 1.0]
    assert len(found) == 3
    assert all(one.meta["n"] > 5 for one in found)
    (seen,) = store.embedding_retrieval(models[0](TEXTS[9]), top_k=1, return_embedding=True)
    assert seen.embedding == pytest.approx(models[0](TEXTS[9]), abs=1e-6)
    again = asyncio.run(RegraftEmbeddingRetriever(store, top_k=100).run_async(models[0](TEXTS[9])))
    assert "bare" not in {one.id for one in again["documents"]}


@pytest.mark.parametrize("field", ["id", "content", "blob"])
def test_fields_that_are_no_metadata_are_refused(field):
    with pytest.raises(FilterError, match=field):
        as_filter({"field": field, "operator": "==", "value": 1})


def test_none_among_values_is_a_field_that_is_null_or_not_there(store, models):
    about = {"null": {"x": None}, "one": {"x": 1}, "two": {"x": 2}}
    store.write_documents(
        [Document(id=key, content="y", meta=meta, embedding=models[0]("y")) for key, meta in about.items()]
    )

    def found(operator, value):
        given = {"field": "meta.x", "operator": operator, "value": value}
        return {one.id for one in store.filter_documents(given)}

    lacking = {f"d{n}" for n in range(len(TEXTS))}
    assert found("in", [None, 1]) == {"null", "one"} | lacking
    assert found("not in", [None, 1]) == {"two"}
    assert found("in", [None]) == {"null"} | lacking


def test_what_no_query_reaches_is_listed_and_deleted_by_filter_too(store, url, name):
    newer = RegraftDocumentStore(name, "without-an-edge", url=url, embedding_dim=10)
    long = {"field": "meta.n", "operator": "in", "value": [*range(3), *range(10_000, 12_000)]}

    assert [one.meta["n"] for one in newer.filter_documents(long)] == [0, 1, 2]
    assert (newer.count_documents_by_filter(long), newer.delete_by_filter(long)) == (3, 3)
    assert (newer.count_documents_by_filter(long), newer.count_documents()) == (0, len(TEXTS) - 3)
    assert newer.delete_by_filter(None) == len(TEXTS) - 3
    newer.documents.client.close()


def test_an_embedding_that_a_transform_made_stays_one_where_metadata_are_updated(store, client, models, name):
    vector = np.asarray(models[0]("cat"))
    items = [{"id": "moved", "embedding": vector, "text": "cat", "metadata": {"n": 99}}]
    client.ingest_embeddings(name, items, version="old", origin="transformed")

    assert store.update_by_filter({"field": "meta.n", "operator": ">", "value": 60}, {"seen": True}) == 12

    assert store.documents.patch_metadata({"gone": {"seen": True}}) == 0
    assert client.item(name, "moved").metadata == {"n": 99, "seen": True}
    assert [(one.version, one.origin) for one in client.item(name, "moved").embeddings] == [("old", "transformed")]
    assert client.missing_items(name, version="old").ids == ["moved"]
    moved = {"field": "meta.n", "operator": "==", "value": 99}
    for source in ({"page": 1, "file": "a"}, {"page": 2}):
        assert store.update_by_filter(moved, {"source": source}) == 1
        assert client.item(name, "moved").metadata["source"] == source


@pytest.mark.parametrize(
    "document",
    [
        Document(blob=ByteStream(b"x")),
        Document(content="a", embedding=[1.0] * 9),
    ],
)
def test_what_cannot_be_kept_is_refused(store, document):
    with pytest.raises((InvalidArgument, ValueError)):
        store.write_documents([Document(content="fine", embedding=[1.0] * 8), document])

    assert store.count_documents() == len(TEXTS)


def test_what_was_written_without_an_embedding_is_not_embedded_again(store, url, models, name):
    store.write_documents([Document(id="plain", content="never embedded")])
    newer, asked = RegraftDocumentStore(name, "new", url=url), []
    told = newer.reembed(lambda texts: [asked.append(x) or models[1](x) for x in texts])
    newer.documents.client.close()

    assert told == len(TEXTS)
    assert "never embedded" not in asked
    assert set(TEXTS) <= set(asked)


def test_documents_too_large_for_one_request_are_stored_in_parts(store):
    many = [Document(id=f"long{n}", content="x" * 3_000, embedding=[1.0] * 8) for n in range(20)]
    assert store.write_documents(many) == 20
    assert store.count_documents() == len(TEXTS) + 20

    with pytest.raises(Problem, match="larger than 20000 bytes") as refused:
        store.write_documents([Document(id="longest", content="x" * 30_000, embedding=[1.0] * 8)])
    assert refused.value.status == 413


def test_a_newer_model_finds_what_the_older_one_stored(store, client, url, models, name):
    newer = RegraftDocumentStore(name, "new", url=url)
    assert newer.reembed(lambda texts: [models[1](x) for x in texts], 48) == 48
    client.fit_edge("new", "old", "procrustes", gallery=name, replace=True)
    client.deploy(name, "new")

    newer.write_documents([Document(id="later", content="whale sings", embedding=models[1]("whale sings"))])

    assert newer.embedding_retrieval(models[1]("ant hides away"), top_k=1)[0].id == "d71"
    assert newer.embedding_retrieval(models[1]("whale sings"), top_k=1)[0].id == "later"
    assert client.gallery(name).mix == {"old": 24, "new": 49}
    assert newer.write_documents([Document(id="d0", content="x", embedding=models[1]("x"))], DuplicatePolicy.SKIP) == 0
    newer.documents.client.close()
    store.delete_all_documents()  # also what the queries of its version no longer reach
    assert client.gallery(name).items == 0
