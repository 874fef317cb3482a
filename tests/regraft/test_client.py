"""The client against a recorded transport: what it sends, what it returns, what it raises."""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from unittest.mock import create_autospec

import httpx
import numpy as np
import pytest
import typer

import regraft
from index.errors import InvalidArgument
from index.query.search_params import SearchParams
from regraft.cli import app
from regraft.client import DEFAULT_K, AsyncClient, Client, ImageItem, Problem, QueryOptions
from regraft.connection import is_header_value
from staging.api.answers import GALLERY, answering, awaiting, connected, named
from staging.inputs.builders import make_version

ROUTES = [
    (lambda c: c.health(), "GET /v1/health"),
    (lambda c: c.ready(), "GET /v1/health/ready"),
    (lambda c: c.create_gallery("g"), "POST /v1/galleries"),
    (lambda c: c.galleries(), "GET /v1/galleries"),
    (lambda c: c.gallery("g"), "GET /v1/galleries/g"),
    (lambda c: c.delete_gallery("g"), "DELETE /v1/galleries/g?confirm=g"),
    (lambda c: c.delete_gallery("g", dry_run=True), "DELETE /v1/galleries/g?confirm=g&dry_run=true"),
    (lambda c: c.create_api_key("shop", "query"), "POST /v1/keys"),
    (lambda c: c.api_keys(), "GET /v1/keys"),
    (lambda c: c.delete_api_key("shop", dry_run=True), "DELETE /v1/keys/shop?confirm=shop&dry_run=true"),
    (lambda c: c.audit(limit=5, before=9), "GET /v1/audit?limit=5&before=9"),
    (lambda c: c.declare_edge("v2", "v1", "truncate", dry_run=True), "POST /v1/edges?dry_run=true"),
    (lambda c: c.fit_edge("v2", "v1", "ridge", dry_run=True), "POST /v1/edges:fit?dry_run=true"),
    (
        lambda c: c.delete_evaluation("g", 3, dry_run=True),
        "DELETE /v1/galleries/g/evaluations/3?confirm=3&dry_run=true",
    ),
    (lambda c: c.pause_backfill(3, dry_run=True), "POST /v1/backfills/3/pause?dry_run=true"),
    (lambda c: c.resume_backfill(3, dry_run=True), "POST /v1/backfills/3/resume?dry_run=true"),
    (lambda c: c.cancel_backfill(3, dry_run=True), "POST /v1/backfills/3/cancel?dry_run=true"),
    (lambda c: c.versions(), "GET /v1/versions"),
    (lambda c: c.version("v1"), "GET /v1/versions/v1"),
    (lambda c: c.edges(new="v2"), "GET /v1/edges?new=v2"),
    (lambda c: c.edge("v2", "v1", "matrix"), "GET /v1/edges/v2/v1/matrix"),
    (lambda c: c.declare_edge("v2", "v1", "identity"), "POST /v1/edges"),
    (lambda c: c.fit_edge("v2", "v1", "ridge"), "POST /v1/edges:fit"),
    (
        lambda c: c.remove_edge("v2", "v1", "matrix", force=True, reason="x"),
        "DELETE /v1/edges/v2/v1/matrix?confirm=matrix&dry_run=false&force=true&reason=x",
    ),
    (lambda c: c.ingest("g", [ImageItem("a", b"x")]), "POST /v1/galleries/g/items?atomic=false"),
    (lambda c: c.ingest("g", [], replace=True), "POST /v1/galleries/g/items?atomic=false&replace=true"),
    (lambda c: c.ingest_embeddings("g", [], atomic=True), "POST /v1/galleries/g/items?atomic=true"),
    (lambda c: c.ingest_embeddings("g", [], replace=False), "POST /v1/galleries/g/items?atomic=false&replace=false"),
    (lambda c: c.items("g", limit=5, cursor="n"), "GET /v1/galleries/g/items?limit=5&cursor=n"),
    (
        lambda c: c.items("g", filter={"field": "n", "eq": 1}),
        "GET /v1/galleries/g/items?limit=100&filter=%7B%22field%22%3A%22n%22%2C%22eq%22%3A1%7D",
    ),
    (lambda c: c.items("g", filter={"field": "n", "in": ["x" * 4096]}), "POST /v1/galleries/g/items:list"),
    (lambda c: c.item("g", "3"), "GET /v1/galleries/g/items/3"),
    (lambda c: c.item_image("g", "a"), "GET /v1/galleries/g/items/a/image?confirm=a"),
    (lambda c: c.delete_item("g", "a"), "DELETE /v1/galleries/g/items/a?confirm=a"),
    (lambda c: c.update_metadata("g", []), "PATCH /v1/galleries/g/items?atomic=false"),
    (
        lambda c: c.update_metadata("g", filter={}, metadata={}, dry_run=True),
        "PATCH /v1/galleries/g/items?atomic=false&dry_run=true",
    ),
    (lambda c: c.delete_items("g", ["a"]), "POST /v1/galleries/g/items:delete"),
    (lambda c: c.delete_items("g", filter={}, dry_run=True), "POST /v1/galleries/g/items:delete?dry_run=true"),
    (lambda c: c.query("g", [b"x"]), "POST /v1/galleries/g/query"),
    (lambda c: c.query_embeddings("g", [[1.0]], "v1"), "POST /v1/galleries/g/query"),
    (lambda c: c.gate("g", "v2", "digit"), "POST /v1/galleries/g/gates"),
    (lambda c: c.gates("g"), "GET /v1/galleries/g/gates"),
    (lambda c: c.gate_page("g", 7), "GET /v1/galleries/g/gates/7/page"),
    (lambda c: c.add_evaluation("g", [{"label": 1}], images=[b"x"]), "POST /v1/galleries/g/evaluations"),
    (
        lambda c: c.add_evaluation("g", [{"label": 1}], embeddings={"v1": [[1.0]]}, dry_run=True),
        "POST /v1/galleries/g/evaluations?dry_run=true",
    ),
    (lambda c: c.evaluations("g"), "GET /v1/galleries/g/evaluations"),
    (lambda c: c.evaluation("g", 3), "GET /v1/galleries/g/evaluations/3"),
    (lambda c: c.delete_evaluation("g", 3), "DELETE /v1/galleries/g/evaluations/3?confirm=3"),
    (lambda c: c.deployment("g", 4), "GET /v1/galleries/g/deployments/4"),
    (lambda c: c.advance("g", 4, "canary"), "POST /v1/galleries/g/deployments/4/advance"),
    (lambda c: c.retire("g", "v1", dry_run=True), "POST /v1/galleries/g/retire?dry_run=true"),
    (lambda c: c.gate_report("g", 7), "GET /v1/galleries/g/gates/7"),
    (lambda c: c.deploy("g", "v2"), "POST /v1/galleries/g/deployments"),
    (lambda c: c.deployments("g"), "GET /v1/galleries/g/deployments"),
    (lambda c: c.rollback("g"), "POST /v1/galleries/g/rollback"),
    (lambda c: c.start_backfill("g"), "POST /v1/galleries/g/backfills"),
    (lambda c: c.backfills("g"), "GET /v1/galleries/g/backfills"),
    (lambda c: c.backfill(3), "GET /v1/backfills/3"),
    (lambda c: c.backfill_failures(3), "GET /v1/backfills/3/failures"),
    (lambda c: c.pause_backfill(3), "POST /v1/backfills/3/pause"),
    (lambda c: c.resume_backfill(3), "POST /v1/backfills/3/resume"),
    (lambda c: c.cancel_backfill(3), "POST /v1/backfills/3/cancel"),
]


@pytest.mark.parametrize(("call", "expected"), ROUTES, ids=[route for _, route in ROUTES])
def test_each_method_speaks_to_its_route(call, expected):
    seen, handler = answering({"id": "3"})  # of an item, which the client compares, or a number of others

    returned, awaited = call(connected(handler)), awaiting(handler, call)

    assert [f"{r.method} {r.url.raw_path.decode()}" for r in seen] == [expected] * 2
    assert returned == awaited


def test_images_travel_as_parts_that_the_item_list_names():
    seen, handler = answering({"stored": 2})

    connected(handler).ingest("g", [ImageItem("a", b"AAA", {"digit": 3}), ImageItem("b/ä", b"BBB")])

    (request,) = seen
    described = json.loads(named(request, "items")[0].get_content())
    images = {p.get_filename(): p.get_payload(decode=True) for p in named(request, "images")}
    assert [(i["id"], i.get("metadata"), images[i["image"]]) for i in described] == [
        ("a", {"digit": 3}, b"AAA"),
        ("b/ä", None, b"BBB"),
    ]


def test_embeddings_are_of_the_current_version_unless_one_is_named():
    seen, handler = answering({"stored": 1})
    client = connected(handler)

    client.ingest_embeddings("g", [{"id": "a", "embedding": [1.0]}])
    client.ingest_embeddings("g", [], version="v2")

    listed = [{"id": "a", "embedding": [1.0]}]
    assert [json.loads(request.content) for request in seen] == [{"items": listed}, {"items": [], "version": "v2"}]


def test_arrays_of_floats_travel_as_they_are():
    seen, handler = answering({"stored": 1, "results": []})
    client, rows = connected(handler), np.eye(3, 4, dtype=np.float32)

    client.query_embeddings("g", rows, "v1", 2, filter={"field": "a", "eq": 1}, mode="raw", strict=True)
    client.ingest_embeddings(
        "g", [{"id": f"{n}", "embedding": row, "metadata": {"n": n}} for n, row in enumerate(rows)]
    )

    query, ingest = seen
    assert query.headers["content-type"] == "application/x-npy"
    assert np.array_equal(np.load(io.BytesIO(query.content)), rows)
    assert dict(query.url.params) == {
        "version": "v1",
        "k": "2",
        "filter": '{"field":"a","eq":1}',
        "mode": "raw",
        "strict": "true",
    }
    (part,) = named(ingest, "embeddings")
    assert np.array_equal(np.load(io.BytesIO(part.get_payload(decode=True))), rows)
    assert json.loads(named(ingest, "items")[0].get_content())[2] == {"id": "2", "metadata": {"n": 2}}


@pytest.mark.parametrize(
    "rows",
    [np.eye(2, dtype=int), np.eye(2)[:0], [np.eye(2)[0], [0.0, 1.0]], np.eye(2, dtype=np.longdouble)],
    ids=["integers", "none", "mixed", "long"],
)
def test_what_is_no_array_of_floats_travels_as_json(rows):
    seen, handler = answering({"stored": 1})

    connected(handler).ingest_embeddings("g", [{"id": "a", "embedding": row} for row in rows])

    assert [item["embedding"] for item in json.loads(seen[0].content)["items"]] == [
        [float(x) for x in row] for row in rows
    ]


def test_an_empty_batch_is_left_to_the_service_to_refuse():
    seen, handler = answering({"code": "empty_batch"}, 422)

    with pytest.raises(Problem, match="422"):
        connected(handler).ingest("g", [])

    assert json.loads(seen[0].content) == {"items": []}


def test_a_query_sends_every_image_in_order_and_k_as_form_fields():
    seen, handler = answering({"results": []})

    connected(handler).query("g", [b"one", b"two"], 5, strict=True)

    (request,) = seen
    assert [p.get_payload(decode=True) for p in named(request, "images")] == [b"one", b"two"]
    assert [named(request, name)[0].get_content() for name in ("k", "strict")] == ["5", "true"]


def test_a_query_without_images_is_json_and_one_with_images_a_form():
    seen, handler = answering({"results": []})
    client = connected(handler)

    client.query("g", k=5, texts=["a red boot", "two"], items=["a"], strict=True)
    client.query("g", [b"one"], texts=["two"], threshold=0.5, mode="rank")

    plain, form = seen
    body = {"texts": ["a red boot", "two"], "items": ["a"], "k": 5, "strict": True}
    assert json.loads(plain.content) == body
    for name, value in (("texts", '["two"]'), ("k", "10"), ("threshold", "0.5"), ("mode", "rank")):
        assert f'name="{name}"\r\n\r\n{value}\r\n'.encode() in form.content


def test_client_and_command_have_the_options_of_a_search():
    fields = SearchParams.model_fields
    command = typer.main.get_group(app).commands["query"]

    assert {"k", *QueryOptions.__annotations__} == set(fields)
    assert fields["k"].default == DEFAULT_K
    # A person asks for more matches, not for the page behind them.
    assert set(fields) - {"cursor"} <= {
        name.lstrip("-").replace("-", "_") for option in command.params for name in option.opts
    }


def test_a_version_folder_is_packed_with_its_card_at_the_root(tmp_path):
    seen, handler = answering({"name": "v1"}, 201)
    version = make_version(tmp_path / "somewhere", "v1", 4)

    connected(handler).register_version(version.folder)

    (archive,) = named(seen[0], "archive")
    with zipfile.ZipFile(io.BytesIO(archive.get_payload(decode=True))) as packed:
        assert set(packed.namelist()) == {"card.json", "encoder.onnx", "probe.npz"}


def test_a_version_archive_is_sent_as_it_is(tmp_path):
    seen, handler = answering({"name": "v1"})
    (tmp_path / "v1.zip").write_bytes(b"zipped")

    connected(handler).register_version(tmp_path / "v1.zip")

    assert named(seen[0], "archive")[0].get_payload(decode=True) == b"zipped"


@pytest.mark.parametrize(
    ("item", "path"),
    [("a/b", b"a%2Fb"), ("...", b"..."), (".a", b".a"), ("a?b#c", b"a%3Fb%23c"), ("ä ", b"%C3%A4%20")],
)
def test_any_id_stays_one_segment_of_the_path(item, path):
    seen, handler = answering({"id": item})

    connected(handler).item("g", item)

    assert seen[0].url.raw_path == b"/v1/galleries/g/items/" + path


@pytest.mark.parametrize("item", ["", ".", "..", "a/../b", "%2e%2E", "..%2f..", "..?x", "a\n", "\ud800"])
def test_what_would_climb_out_of_its_path_is_not_sent(item):
    seen, handler = answering({})
    client = connected(handler)

    for call in (client.item, client.item_image, client.delete_item):
        with pytest.raises(InvalidArgument):
            call("g", item)
    with pytest.raises(InvalidArgument):
        client.delete_gallery(item)

    assert seen == []


def test_the_package_offers_the_client_without_importing_it_first():
    assert regraft.Client is Client
    assert regraft.Problem is Problem

    with pytest.raises(AttributeError, match="Manager"):
        _ = regraft.Manager


def test_a_mock_with_the_client_as_its_spec_has_its_methods():
    mocked = create_autospec(Client, instance=True)
    mocked.gallery.return_value = GALLERY

    assert mocked.gallery("g") == GALLERY
    mocked.gallery.assert_called_once_with("g")
    with pytest.raises(TypeError, match="'name'"):
        mocked.gallery()

    awaited = create_autospec(AsyncClient, instance=True)
    awaited.gallery.return_value = GALLERY
    assert asyncio.run(awaited.gallery("g")) == GALLERY


@pytest.mark.parametrize("key", ["user7", "zoë", "a\nb", "x ", "\ud800"])
def test_any_text_can_be_the_key_of_a_query(key):
    seen, handler = answering({"results": [], "degraded": []})
    with Client("http://service:1", transport=httpx.MockTransport(handler)) as client:
        for text in (key, key, f"{key}!"):
            client.query("g", texts=["t"], query_key=text)

    sent = [request.headers["x-query-key"] for request in seen]
    assert all(map(is_header_value, sent))
    assert (sent[0] == sent[1], sent[0] == sent[2]) == (True, False)
    assert sent[0] == key or key != "user7"


def test_a_subclass_may_do_more_and_call_the_method_by_the_class():
    class Loud(Client):
        def gallery(self, name):
            return Client.gallery(self, name).name + "!"

    _, handler = answering(GALLERY)
    with Loud("http://service:1", transport=httpx.MockTransport(handler)) as client:
        assert client.gallery("g") == "g!"
