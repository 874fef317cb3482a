"""What callers give the client: wrong values are refused before any request, and arrays and numbers of numpy taken."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

import regraft
from regraft.client import ImageItem, TextItem
from staging.api.answers import answering, connected, named

NAN = float("nan")
MASKED = np.ma.masked_array(np.ones(2), mask=[True, False])
FILE = b"an image file"
WRONG = [
    (lambda c: c.query("g", "cat.png"), r"images is a path: give a list of files' bytes"),
    (lambda c: c.query("g", [Path("cat.png")]), r"images\[0\] is a path: give the file's bytes, as Path\('cat.png'\)"),
    (lambda c: c.query("g", FILE), r"images is one image: give a list"),
    (lambda c: c.query("g", [np.zeros((8, 8))]), r"images\[0\] must be the bytes of an image file .*, not ndarray"),
    (lambda c: c.query("g", [b""]), r"images\[0\] is empty"),
    (lambda c: c.query("g"), "the query is empty: give at least one of images, texts, items"),
    (lambda c: c.query("g", texts="boot"), r"texts is one string: give a list, as \['boot'\]"),
    (lambda c: c.query("g", items=[7]), r"items\[0\] must be a string, not int"),
    (lambda c: c.query_embeddings("g", [], "v1"), "the query is empty: give at least one of embeddings"),
    (lambda c: c.query_embeddings("g", [1.0, 2.0], "v1"), "embeddings is one vector: give a list of vectors"),
    (lambda c: c.query_embeddings("g", np.ones(2), "v1"), "embeddings is one vector: give a list of vectors"),
    (lambda c: c.query_embeddings("g", np.ones((1, 2, 2)), "v1"), r"embeddings\[0\] must be one vector"),
    (lambda c: c.query_embeddings("g", [[1.0, NAN]], "v1"), r"embeddings\[0\]\[1\] must be finite, not nan"),
    (lambda c: c.query_embeddings("g", np.array([[np.inf]]), "v1"), r"embeddings\[0\]\[0\] must be finite, not inf"),
    (lambda c: c.query_embeddings("g", [[1.0], [1.0, 2.0]], "v1"), r"embeddings\[1\] has 2 numbers, .*\[0\] has 1"),
    (lambda c: c.query_embeddings("g", [["a"]], "v1"), r"embeddings\[0\] must be one vector"),
    (lambda c: c.query_embeddings("g", [[]], "v1"), r"embeddings\[0\] is empty"),
    (lambda c: c.ingest("g", [ImageItem("a", FILE), ImageItem("b", "b.png")]), r"items\[1\].image is a path"),
    (lambda c: c.ingest("g", [("a", FILE)]), r"items\[0\] must be an ImageItem or a TextItem, not tuple"),
    (lambda c: c.ingest("g", [ImageItem("a", FILE, {"n": NAN})]), r"items\[0\].metadata cannot be written as JSON"),
    (
        lambda c: c.ingest_embeddings("g", [{"id": "a", "embedding": [NAN]}]),
        r"items\[0\].embedding\[0\] must be finite, not nan",
    ),
    (
        lambda c: c.ingest_embeddings("g", [{"id": "a", "embedding": np.ones((1, 2))}]),
        r"items\[0\].embedding must be one",
    ),
    (lambda c: c.ingest("g", ImageItem("a", FILE)), "items must be a list, not ImageItem"),
    (lambda c: c.ingest_texts("g", None), "items must be a list, not NoneType"),
    (lambda c: c.ingest_embeddings("g", {"id": "a", "embedding": [1.0]}), "items is one item: give a list"),
    (lambda c: c.put_embeddings("g", 7), "items must be a list, not int"),
    (lambda c: c.query_embeddings("g", MASKED[None], "v1"), r"embeddings\[0\] must be one vector"),
    (
        lambda c: c.ingest_embeddings("g", [{"id": "a", "embedding": MASKED}]),
        r"items\[0\].embedding must be one vector",
    ),
    *(
        (lambda c, t=t: c.ingest("g", [ImageItem("a", FILE, {"t": t})]), r"items\[0\].metadata cannot .* datetime64")
        for t in (np.datetime64("2024-01-01", "ns"), np.datetime64("2024-01-01", "s"))
    ),
    (lambda c: c.ingest_embeddings("g", ["a"]), r"items\[0\] must be \{id, metadata, embedding\}, not str"),
    (lambda c: c.delete_items("g", "abc"), r"items is one string: give a list, as \['abc'\]"),
    (lambda c: c.update_metadata("g", {"id": "a", "metadata": {}}), r"items is one item: give a list"),
    (lambda c: c.update_metadata("g", ["a"]), r"items\[0\] must be \{id, metadata\}, not str"),
    (lambda c: c.update_metadata("g", [{"id": "a", "metadata": {"n": NAN}}]), r"items\[0\].metadata cannot be written"),
    (lambda c: c.add_evaluation("g", [{}], images=["a.png"]), r"images\[0\] is a path"),
    (lambda c: c.add_evaluation("g", [{}], embeddings={"v1": [1.0]}), r"embeddings\['v1'\] is one vector"),
    (lambda c: c.add_evaluation("g", [{"label": {1, 2}}], images=[FILE]), "as JSON: a value of type set"),
    (lambda c: c.items("g", filter={"field": "n", "eq": NAN}), "cannot be sent as JSON"),
    (lambda c: c.query("g", texts=["a"], filter={"field": "n", "eq": FILE}), "as JSON: a value of type bytes"),
]


@pytest.mark.parametrize(("call", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_cannot_be_sent_is_told_before_any_request(call, said):
    seen, handler = answering({})

    with pytest.raises(regraft.InvalidInput, match=said):
        call(connected(handler))

    assert seen == []


def test_arrays_are_taken_wherever_lists_are():
    seen, handler = answering({})
    client = connected(handler)
    item = {"id": "a", "embedding": np.float32([0.5, 2]), "metadata": {"n": np.int64(3), "xs": np.arange(2)}}

    client.query_embeddings("g", np.float32([[1, 2]]), "v1")
    client.query_embeddings("g", [np.float32([1, 2])], "v1")
    client.query_embeddings("g", [(np.float32(1), 2)], "v1")  # type: ignore[list-item]  # no `float` to a type checker
    client.ingest_embeddings("g", [item])
    client.ingest("g", [ImageItem("a", bytearray(FILE), {"n": np.float32(0.5)})])

    assert np.load(io.BytesIO(seen[0].content)).tolist() == [[1.0, 2.0]]
    assert [json.loads(request.content)["embeddings"] for request in seen[1:3]] == [[[1.0, 2.0]]] * 2
    described = json.loads(named(seen[3], "items")[0].get_content())
    assert described == [{"id": "a", "metadata": {"n": 3, "xs": [0, 1]}}]
    assert json.loads(named(seen[4], "items")[0].get_content())[0]["metadata"] == {"n": 0.5}


def test_a_generator_of_items_is_taken_wherever_a_list_is():
    sent = []
    for as_given in (iter, list):
        seen, handler = answering({})
        client, one = connected(handler), {"id": "a", "metadata": {"n": 1}}

        client.ingest("g", as_given([ImageItem("a", FILE), TextItem("b", "c")]))
        client.ingest_texts("g", as_given([TextItem("b", "c")]))
        client.ingest_embeddings("g", as_given([{**one, "embedding": [1.0]}]))
        client.ingest_embeddings("g", as_given([{**one, "embedding": np.float32([1.0])}]))
        client.put_embeddings("g", as_given([{"id": "a", "embedding": np.float32([1.0])}]))

        boundaries = [request.headers["content-type"].partition("boundary=")[2].encode() for request in seen]
        sent.append([request.content.replace(b or b"-", b"") for request, b in zip(seen, boundaries, strict=True)])
    assert sent[0] == sent[1]
    assert FILE in sent[0][0]


def test_numbers_of_numpy_are_taken_wherever_numbers_are():
    seen, handler = answering({})
    client, labels = connected(handler), np.arange(3, 5)
    where = {"field": "n", "in": labels}

    client.query("g", texts=["a"], k=labels[0], threshold=np.float32(0.5), filter=where)
    client.query_embeddings("g", np.ones((1, 2)), "v1", labels[0], filter=where)
    client.items("g", limit=labels[0], filter=where)
    client.delete_items("g", filter=where)
    client.add_evaluation("g", [{"label": label} for label in labels], embeddings={"v1": np.eye(2)})
    client.add_evaluation("g", [{"label": labels[0]}], images=[FILE])
    client.update_metadata("g", [{"id": "a", "metadata": {"n": labels[0]}}], filter=where, metadata={"m": labels})

    plain = {"field": "n", "in": [3, 4]}
    bodies = [json.loads(seen[n].content) for n in (0, 3, 4)]
    assert bodies[:2] == [{"texts": ["a"], "k": 3, "threshold": 0.5, "filter": plain}, {"filter": plain}]
    assert bodies[2]["entries"] == [{"label": 3}, {"label": 4}]
    asked, listed = (seen[n].url.params for n in (1, 2))
    assert (asked["k"], listed["limit"]) == ("3", "3")
    assert json.loads(asked["filter"]) == json.loads(listed["filter"]) == plain
    assert json.loads(named(seen[5], "entries")[0].get_content()) == [{"label": 3, "image": "0"}]
    changed = {"items": [{"id": "a", "metadata": {"n": 3}}], "filter": plain, "metadata": {"m": [3, 4]}}
    assert json.loads(seen[6].content) == changed
