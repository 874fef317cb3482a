"""The vector store of LangChain against LangChain's own suite, filters, diversity, and an upgrade of the model."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("langchain_tests", reason="needs regraft[langchain] and langchain-tests")

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from index.errors import InvalidArgument
from regraft.client import Problem
from regraft.integrations.conditions import UnsupportedFilter
from regraft.integrations.documents import DegradedAnswer
from regraft.integrations.langchain import RegraftVectorStore, as_filter
from staging.inputs.embedding_models import TEXTS

DOCUMENTS = [
    Document(id=f"d{n}", page_content=text, metadata={"n": n, "tags": [text.split()[0]]})
    for n, text in enumerate(TEXTS)
]


class Fake(Embeddings):
    """A model of the tests as LangChain has them."""

    def __init__(self, model):
        self._model = model

    def embed_documents(self, texts):
        return [self._model(text) for text in texts]

    def embed_query(self, text):
        return self._model(text)


class TestRegraftVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, client, name):
        return RegraftVectorStore(self.get_embeddings(), gallery=name, version="fake-6", client=client)


@pytest.fixture
def store(client, name, models):
    made = RegraftVectorStore(Fake(models[0]), gallery=name, version="old", client=client)
    made.add_documents(DOCUMENTS)
    return made


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        ({"n": 3}, lambda n: n == 3),
        ({"n": {"$ne": 3}}, lambda n: n != 3),
        ({"n": {"$in": [1, 2, 99]}}, lambda n: n in (1, 2)),
        ({"n": {"$in": []}}, lambda n: False),
        ({"n": {"$nin": [1, 2]}}, lambda n: n not in (1, 2)),
        ({"n": {"$gt": 5, "$lte": 8}}, lambda n: 5 < n <= 8),
        ({"n": {"$gte": 20}}, lambda n: n >= 20),
        ({"n": {"$lt": 2}}, lambda n: n < 2),
        ({"n": {"$between": [4, 6]}}, lambda n: 4 <= n <= 6),
        ({"n": {"$exists": False}}, lambda n: False),
        ({"tags": "owl", "n": {"$lt": 26}}, lambda n: n in (24, 25)),
        ({"$or": [{"n": 1}, {"$and": [{"n": {"$gt": 2}}, {"n": {"$lt": 5}}]}]}, lambda n: n in (1, 3, 4)),
        ({"$not": {"n": {"$gt": 0}}}, lambda n: n == 0),
        ({"field": "n", "range": {"lt": 2}}, lambda n: n < 2),
        ({"or": [{"field": "n", "eq": 1}, {"field": "tags", "prefix": "ow"}]}, lambda n: n == 1 or 24 <= n < 36),
    ],
)
def test_filters_pass_what_they_say(store, given, passes):
    found = store.similarity_search("cat runs", k=len(DOCUMENTS), filter=given)

    assert {one.metadata["n"] for one in found} == {n for n in range(len(DOCUMENTS)) if passes(n)}


@pytest.mark.parametrize(
    "given",
    [
        lambda document: True,
        {"n": {"$like": "a%"}},
        {"n": {"$nonsense": 1}},
        {"$nor": [{"n": 1}]},
        {"$and": {"n": 1}},
        {"n": [1, 2]},
        {"n": {"$in": "abc"}},
        {"n": {"$gt": None}},
        {"n": {"$between": [1]}},
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(given):
    with pytest.raises(UnsupportedFilter):
        as_filter(given)


def test_scores_relevance_and_retrievers(store):
    (best, score), *_ = store.similarity_search_with_score("cat sleeps here", k=3)
    (_, relevance), *_ = store.similarity_search_with_relevance_scores("cat sleeps here", k=3)
    retrieved = store.as_retriever(search_kwargs={"k": 2, "filter": {"tags": "dog"}}).invoke("cat sleeps here")

    assert (best.id, best.page_content) == ("d0", "cat sleeps here")
    assert (round(score, 5), round(relevance, 5)) == (1.0, 1.0)
    assert [one.metadata["tags"] for one in retrieved] == [["dog"], ["dog"]]


def test_diverse_matches_repeat_less(store):
    store.add_texts(["cat sleeps here"] * 4)

    near = store.similarity_search("cat sleeps here", k=4)
    diverse = store.max_marginal_relevance_search("cat sleeps here", k=4, lambda_mult=0.3)

    assert len({one.page_content for one in near}) == 1
    assert diverse[0].page_content == "cat sleeps here"
    assert len({one.page_content for one in diverse}) == 4


def test_of_distances_the_nearest_have_the_highest_scores(client, name, models):
    store = RegraftVectorStore(Fake(models[0]), gallery=name, version="old-l2", client=client, space={"kind": "l2"})
    store.add_documents(DOCUMENTS)
    options = {"k": 9, "score_threshold": 0.8}

    found = store.similarity_search_with_relevance_scores("cat sleeps here", k=len(DOCUMENTS))
    near = store.as_retriever(search_type="similarity_score_threshold", search_kwargs=options).invoke("cat sleeps here")
    diverse = store.max_marginal_relevance_search("cat sleeps here", k=3, lambda_mult=1.0)

    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)
    assert (found[0][0].id, scores[0]) == ("d0", 1.0)
    assert 0.0 < scores[-1] < scores[1] < 1.0
    assert [one.id for one in near] == [one.id for one, score in found[:9] if score >= 0.8]
    assert [one.id for one in diverse] == [one.id for one, _ in found[:3]]


def test_a_name_with_a_dot_is_a_key_of_its_own_or_a_path(store):
    store.add_texts(["a", "b", "c"], [{"a.b": 1}, {"a": {"b": 1}}, {"a.b": 2}], ids=["own", "path", "other"])

    def found(given):
        return {one.id for one in store.similarity_search("cat", k=100, filter=given)}

    assert found({"a.b": 1}) == {"own", "path"}
    assert found({"a.b": {"$exists": True, "$ne": 1}}) == {"other"}
    assert found({"a.b": {"$in": [2, 3]}}) == found({"a.b": {"$gt": 1}}) == {"other"}
    assert found({"a.b": {"$exists": False}}) == {one.id for one in DOCUMENTS}


def test_documents_with_long_ids_are_found_by_them(store):
    ids = [f"{'漢' * 150}/{n}" for n in range(60)]
    store.add_texts(["a text"] * 60, ids=ids)

    assert [one.id for one in store.get_by_ids(ids)] == ids


def test_of_texts_with_one_id_the_last_is_stored(store):
    assert store.add_texts(["a", "b", "c"], ids=["x", "y", "x"]) == ["x", "y", "x"]

    assert [one.page_content for one in store.get_by_ids(["x", "y"])] == ["c", "b"]


def test_what_cannot_be_stored_is_refused(store):
    with pytest.raises(Problem, match="/items/1/id: id must be"):
        store.add_texts(["a", "b"], ids=["a", "\n"])
    with pytest.raises(InvalidArgument, match="metadatas"):
        store.add_texts(["a", "b"], [{}])
    with pytest.raises(InvalidArgument, match="ids"):
        store.delete()


def test_any_text_and_any_metadata_come_back_and_imported_items_are_read(store, client, models, name):
    vector = models[0]("cat")
    store.documents.put(["blank", "own"], [" ", "b"], [{}, {"text": "mine"}], [vector, vector])
    client.ingest_embeddings(name, [{"id": "imported", "embedding": vector, "metadata": {"text": "t", "n": 1}}])

    shown = store.get_by_ids(["blank", "own", "imported"])

    assert [(x.page_content, x.metadata) for x in shown] == [(" ", {}), ("b", {"text": "mine"}), ("t", {"n": 1})]
    assert client.item(name, "own").text == "b"


def test_what_holds_no_text_is_not_embedded_as_if_it_were_empty(store, client, models, name):
    vector = models[0]("cat")
    client.ingest_embeddings(name, [{"id": "imported", "embedding": vector, "metadata": {"body": "a text"}}])
    newer = RegraftVectorStore(Fake(models[1]), gallery=name, version="new", client=client)

    with pytest.raises(InvalidArgument, match="'imported' is not a text, and its metadata has no field 'text'"):
        newer.reembed()

    assert (
        RegraftVectorStore(Fake(models[1]), gallery=name, version="new", client=client, text_key="body").reembed() > 0
    )


def test_stores_that_begin_at_once_all_store(client, name, models):
    def begin(number):
        RegraftVectorStore(Fake(models[0]), gallery=name, version="old", client=client).add_texts(
            ["a"], ids=[str(number)]
        )

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(begin, range(8)))

    assert client.gallery(name).items == 8


def test_a_store_stores_before_it_sees_that_another_one_has_deployed(client, name, models, monkeypatch):
    RegraftVectorStore(Fake(models[0]), gallery=name, version="old", client=client).add_texts(["a"], ids=["1"])
    with monkeypatch.context() as late:
        seen = client.gallery
        late.setattr(client, "gallery", lambda name: seen(name).model_copy(update={"current": None}))
        RegraftVectorStore(Fake(models[0]), gallery=name, version="old", client=client).add_texts(["a"], ids=["2"])

    assert client.gallery(name).items == 2


def test_relevance_keeps_its_scale_when_matches_of_two_versions_are_calibrated(store, client, models, name):
    newer = RegraftVectorStore(Fake(models[1]), gallery=name, version="calibrated", client=client)
    newer.reembed(48)
    client.fit_edge("calibrated", "old", "procrustes", gallery=name, label="tags")
    client.deploy(name, "calibrated")
    asked = {"k": len(DOCUMENTS), "score_threshold": 0.9}

    def relevances(**options):
        found = newer.similarity_search_with_relevance_scores("cat sleeps here", k=len(DOCUMENTS), **options)
        return {one.id: round(relevance, 5) for one, relevance in found}

    found = newer.documents.search(models[1]("cat sleeps here"), len(DOCUMENTS))
    assert any(match.score != match.raw_score for match in found)  # they are calibrated
    cosines = {match.id: round((match.raw_score + 1) / 2, 5) for match in found}
    assert relevances() == relevances(mode="rank") == cosines
    assert relevances(mode="calibrated") == {match.id: round(match.score, 5) for match in found}
    retriever = newer.as_retriever(search_type="similarity_score_threshold", search_kwargs=asked)
    near = {key for key, relevance in cosines.items() if relevance >= 0.9}
    assert {one.id for one in retriever.invoke("cat sleeps here")} == near != set(cosines)
    assert {one.id for one in asyncio.run(retriever.ainvoke("cat sleeps here"))} == near


def test_a_store_without_documents_has_no_relevant_ones(client, name, models):
    store = RegraftVectorStore(Fake(models[0]), gallery=name, version="unborn", client=client)

    assert store.similarity_search_with_relevance_scores("cat") == []


def test_a_newer_model_finds_what_the_older_one_stored(store, client, models, name):
    newer = RegraftVectorStore(Fake(models[1]), gallery=name, version="new", client=client)
    assert newer.reembed(48) == 48
    client.fit_edge("new", "old", "procrustes", gallery=name)
    client.deploy(name, "new")

    newer.add_documents([Document(id="later", page_content="whale sings below")])

    assert newer.similarity_search("ant hides away", k=1)[0].id == "d71"
    assert client.gallery(name).mix == {"old": 24, "new": 49}
    with pytest.warns(DegradedAnswer, match="49 documents of new were not searched by old: "):
        assert store.similarity_search("ant hides away", k=1)[0].id == "d71"
    assert newer.similarity_search("whale sings below", k=1)[0].id == "later"
    assert newer.max_marginal_relevance_search("ant hides away", k=2, fetch_k=30)[0].id == "d71"
    assert newer.reembed() == 24
    assert client.gallery(name).mix == {"new": 73}
