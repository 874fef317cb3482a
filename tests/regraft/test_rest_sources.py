"""Weaviate and OpenSearch, read from small servers that answer as their documentation of the REST API says."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest

from index.errors import InvalidArgument
from regraft.sources.base import ItemSource, Wanted
from regraft.sources.opening import open_source

COUNT = 10
FIELDS = {
    "v": {"type": "knn_vector", "method": {"space_type": "l2"}},
    "n": {"type": "integer"},
    "said": {"type": "text"},
    "key": {"type": "keyword"},
}
UUIDS = [f"00000000-0000-0000-0000-{n:012}" for n in range(COUNT)]


def row(number: int) -> list[float]:
    return [float(number), 1.0]


class Fake(BaseHTTPRequestHandler):
    """Both databases at once; a request without the credentials of either is refused."""

    named: ClassVar[bool] = False
    keyed: ClassVar[int] = COUNT
    """Documents that have the field `key`, the first ones: the others come last in its order."""
    sharing: ClassVar[int] = 1
    """Documents with one value of `key`."""
    mapping: ClassVar[dict[str, Any]] = {}
    credentials = ("Bearer secret", "Basic " + base64.b64encode(b"admin:secret").decode())

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: Any) -> None:
        path, asked = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        known = self.headers["authorization"] in self.credentials
        told = self._told(path, {name: one[0] for name, one in asked.items()}, body) if known else {"error": "who?"}
        content = json.dumps(told or {"error": "no such index"}).encode()
        self.send_response(200 if known and told else 404 if known else 401)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _told(self, path: str, asked: dict[str, str], body: Any) -> Any:
        if path == "/v1/schema/Things":
            about = {"vectorIndexConfig": {"distance": "l2-squared"}}
            named = {"properties": [{"name": "n"}, {"name": "said"}]}
            vectors = {"vectorConfig": {"a": about, "b": about}} if self.named else about
            return {"class": "Things", **named, **vectors}
        if path == "/v1/graphql":
            return {"data": {"Aggregate": {"Things": [{"meta": {"count": COUNT}}]}}}
        if path == "/v1/objects":
            assert (asked["class"], asked["include"]) == ("Things", "vector")
            start = UUIDS.index(asked["after"]) + 1 if asked["after"] else 0
            return {"objects": [self._object(n) for n in range(start, min(COUNT, start + int(asked["limit"])))]}
        if path == "/things/_mapping":
            return {"things": {"mappings": {"properties": FIELDS, **self.mapping}}}
        if path == "/things/_count":
            return {"count": COUNT if body is None else COUNT - self.keyed}
        if path == "/things/_search":
            asked_for = self.keyed if body["query"] == {"exists": {"field": "key"}} else COUNT
            order = [field for one in body["sort"] for field in one]
            hits = [self._hit(n, order) for n in range(asked_for)]
            behind = [hit for hit in hits if "search_after" not in body or hit["sort"] > body["search_after"]]
            return {"hits": {"hits": behind[: body["size"]]}}
        return None

    def _object(self, number: int) -> Any:
        vectors = {"a": row(number), "b": [1.0, 2.0, float(number)]} if number % 2 else {"b": [1.0, 2.0, float(number)]}
        held = {"vectors": vectors} if self.named else {"vector": row(number)}
        return {"id": UUIDS[number], "class": "Things", "properties": {"n": number, "said": f"s{number}"}, **held}

    def _hit(self, number: int, order: list[str]) -> Any:
        source = {"v": row(number), "n": number, "said": f"s{number}"}
        source |= {"key": f"k{number // self.sharing}"} if number < self.keyed else {}
        hit = {"_id": f"d{number}", "_source": source}
        return hit | {"sort": [hit["_id"] if field == "_id" else source.get(field) for field in order]}


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Fake, "named", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def rows(source: ItemSource, after: Any = None) -> list[tuple[str, list[float], Any]]:
    return [
        (key, vector, about)
        for batch in source.batches(3, after)
        for key, vector, about in zip(batch.ids, batch.columns[0].vectors.tolist(), batch.metadata, strict=True)
    ]


@pytest.mark.parametrize(
    ("source", "key", "wanted", "ids", "kept"),
    [
        ("weaviate:{0}#Things", "secret", Wanted(), UUIDS, lambda n: {"n": n, "said": f"s{n}"}),
        (
            "opensearch:{0}#things",
            "admin:secret",
            Wanted(),
            [f"d{n}" for n in range(COUNT)],
            lambda n: {"n": n, "key": f"k{n}", "said": f"s{n}"},
        ),
        (
            "opensearch:{0}#things",
            "admin:secret",
            Wanted(id="key"),
            [f"k{n}" for n in range(COUNT)],
            lambda n: {"n": n, "said": f"s{n}"},
        ),
    ],
)
def test_all_rows_come_whole_and_behind_any_cursor(
    address: str, source: str, key: str, wanted: Wanted, ids: Any, kept: Any
) -> None:
    opened = open_source(source.format(address), wanted, key=key)
    expected = [(ids[n], row(n), kept(n)) for n in range(COUNT)]

    assert opened.count == COUNT
    assert rows(opened) == expected
    for at, batch in enumerate(opened.batches(3)):
        assert rows(opened, json.loads(json.dumps(batch.cursor))) == expected[3 * at + 3 :]
    assert "secret" not in opened.identity


def test_documents_without_the_field_of_ids_are_counted_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "keyed", 8)

    batches = list(
        islice(open_source(f"opensearch:{address}#things", Wanted(id="key"), key="admin:secret").batches(3), 9)
    )

    assert [key for batch in batches for key in batch.ids] == [f"k{n}" for n in range(8)]
    assert (batches[-1].read, batches[-1].skipped) == (2, {"no id": 2})


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_documents_with_one_id_all_come_wherever_pages_end(
    address: str, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(Fake, "sharing", 4)
    source = open_source(f"opensearch:{address}#things", Wanted(id="key"), key="admin:secret")

    batches = list(islice(source.batches(size), COUNT + 1))

    assert [about["n"] for batch in batches for about in batch.metadata if about] == list(range(COUNT))
    assert [key for batch in batches for key in batch.ids] == ["k0"] * 4 + ["k1"] * 4 + ["k2"] * 2
    for batch in batches:  # also after an interruption
        rest = [key for later in source.batches(size, json.loads(json.dumps(batch.cursor))) for key in later.ids]
        assert len(rest) == COUNT - 1 - (batch.metadata[-1] or {})["n"]


@pytest.mark.parametrize("source", ["weaviate:{0}#Things", "opensearch:{0}#things"])
def test_the_texts_of_rows_are_a_field_of_theirs(address: str, source: str) -> None:
    key = "secret" if source.startswith("weaviate") else "admin:secret"
    batches = list(open_source(source.format(address), Wanted(text="said"), key=key).batches(3))

    assert [text for batch in batches for text in batch.texts] == [f"s{n}" for n in range(COUNT)]
    assert not any("said" in about for batch in batches for about in batch.metadata if about)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("source", ["weaviate:{0}#Things", "opensearch:{0}#things"])
def test_vectors_that_would_be_ordered_otherwise_are_refused(
    address: str, source: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "named", named)
    key = "secret" if source.startswith("weaviate") else "admin:secret"
    fitting, other = (
        open_source(source.format(address), Wanted(version="v1"), key=key, space_of={"v1": space}.__getitem__)
        for space in ("l2", "cosine")
    )

    assert next(fitting.batches(3)).read == 3
    with pytest.raises(InvalidArgument, match=r"by l2.*, but v1 has space cosine"):
        next(other.batches(3))


def test_named_vectors_of_weaviate_are_columns(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "named", True)

    opened = open_source(f"weaviate:{address}#Things", Wanted(vectors={"a": "v1", "b": "v2"}), key="secret")
    first = next(opened.batches(4))

    assert [(c.version, c.rows.tolist()) for c in first.columns] == [("v1", [1, 3]), ("v2", [0, 1, 2, 3])]
    with pytest.raises(InvalidArgument, match="only: a, b"):
        open_source(f"weaviate:{address}#Things", Wanted(vectors={"c": None}), key="secret")


@pytest.mark.parametrize(
    ("source", "key", "told"),
    [
        ("weaviate:{0}#Things", "wrong", "Weaviate returned status 401"),
        ("weaviate:{0}#Nothing", "secret", "Weaviate returned status 404"),
        ("weaviate:{0}#things", "secret", "capital letter"),
        ("weaviate:here#Things", "secret", "http://"),
        ("opensearch:{0}#gone", "admin:secret", "OpenSearch returned status 404"),
        ("opensearch:http://127.0.0.1:9#things", "admin:secret", "OpenSearch cannot be read"),
    ],
)
def test_what_cannot_be_read_is_said_in_words(address: str, source: str, key: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        open_source(source.format(address), Wanted(), key=key)


@pytest.mark.parametrize("key", ["secret\n", "secret-ключ"])
def test_what_is_no_key_is_refused_and_not_shown(address: str, key: str) -> None:
    with pytest.raises(InvalidArgument, match="key of Weaviate") as refused:
        open_source(f"weaviate:{address}#Things", Wanted(), key=key)

    assert "secret" not in str(refused.value)


def test_a_field_of_vectors_that_is_not_there_is_told(address: str) -> None:
    with pytest.raises(InvalidArgument, match="things has no vector 'w', only: v"):
        open_source(f"opensearch:{address}#things", Wanted(vectors={"w": None}), key="admin:secret")


def test_a_field_of_metadata_that_no_row_can_have_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for source, key, fields in (
        ("weaviate:{0}#Things", "secret", "n, said"),
        ("opensearch:{0}#things", "admin:secret", "v, n, said, key"),
    ):
        with pytest.raises(InvalidArgument, match=f"has no field 'citty', only: {fields}$"):
            open_source(source.format(address), Wanted(metadata=["n", "citty"]), key=key)
    monkeypatch.setattr(Fake, "mapping", {"dynamic": "false"})  # documents may have fields that the mapping lacks
    assert open_source(f"opensearch:{address}#things", Wanted(metadata=["citty"]), key="admin:secret").count == COUNT


def test_another_field_of_vectors_is_metadata_only_if_asked_for(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIELDS, "n", {"type": "knn_vector"})
    wanted = (Wanted(vectors={"v": "v1"}, metadata=metadata) for metadata in (None, ["n"]))

    first, second = (
        next(open_source(f"opensearch:{address}#things", one, key="admin:secret").batches(3)).metadata[1]
        for one in wanted
    )

    assert first is not None
    assert "n" not in first
    assert second == {"n": 1}
