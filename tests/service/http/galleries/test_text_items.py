"""Items that are texts: kept as given, embedded as items, moved by backfills, shown in answers, beside images."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.encoders.encoder import Encoder
from index.encoders.image import decode_image
from index.encoders.text import TextEncoder
from index.version import Version
from index.version_folder.folder import load_version, write_card
from regraft.client import Client, ImageItem, TextItem
from regraft.remote import RemoteWorker
from service.store.image_store.blobs import StoreUnreachable
from staging.api.served import problem
from staging.inputs.builders import add_text, make_version

TEXTS = {
    "one": "east north",
    "same": "east north",
    "spaced": "  east\r\n\teast  ",
    "long": "north " * 3000,
    "other": "Ça, быстрая 敏捷 الثعلب 👩‍👩‍👧‍👦 é",
    "nul": "east\x00north north",
}
WORDS = {word: np.random.default_rng(n).normal(size=6) for n, word in enumerate(["east", "north", "doc:"])}


@pytest.fixture(scope="module")
def reading(served: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Version]:
    """`old` and `new` read nothing but texts, `new` with a prompt for items; `both` reads images and texts."""
    root, made = tmp_path_factory.mktemp("reading"), {}
    for name, dim, encoder in (("old", 4, False), ("new", 6, False), ("both", 4, True)):
        bare = make_version(root / name, name, dim, encoder=encoder)
        version = add_text(bare, {word: vector[:dim] for word, vector in WORDS.items()})
        if name == "new":
            write_card(version.folder, replace(version.card, prompts={"item": "doc: "}))
            version = load_version(version.folder)
        assert served.register(version).status_code == 201
        made[name] = version
    return made


@pytest.fixture
def stored(served: Any, reading: dict[str, Version]) -> str:
    path = served.gallery("old")
    answer = post(served, path, TEXTS).json()
    assert (answer["stored"], answer["failed"]) == (len(TEXTS), 0)
    return path


@pytest.fixture
def client(served: Any) -> Iterator[Client]:
    with Client(served.url) as made:
        yield made


def post(served: Any, path: str, texts: dict[str, Any], **params: Any) -> Any:
    items = [{"id": key, "text": text, "metadata": {"label": text[:4]}} for key, text in texts.items()]
    return served.http.post(f"{path}/items", json={"items": items}, params=params)


def raising(error: Exception) -> Callable[[str], bytes]:
    def fetch(_: str) -> bytes:
        raise error

    return fetch


def vectors(served: Any, path: str, version: str) -> dict[str, list[float]]:
    items = served.http.get(f"{path}/items:embeddings", params={"versions": version}).json()["items"]
    return {one["id"]: one["embeddings"][0]["embedding"] for one in items if one["embeddings"]}


def expected(version: Version, texts: dict[str, str]) -> dict[str, Any]:
    encoder = TextEncoder(version)
    rows = encoder.vectors([encoder.prepare(text, "item") for text in texts.values()])
    return {key: pytest.approx(row, abs=1e-6) for key, row in zip(texts, rows.tolist(), strict=True)}


def test_texts_are_kept_as_given_embedded_and_shown(served: Any, reading: dict[str, Version], stored: str) -> None:
    assert vectors(served, stored, "old") == expected(reading["old"], TEXTS)
    for key, text in TEXTS.items():
        shown = served.http.get(f"{stored}/items/{key}").json()
        assert (shown["text"], shown["image"]) == (text, False)
    problem(served.http.get(f"{stored}/items/one/image"), 404, "no_image")
    listed = served.http.get(f"{stored}/items", params={"with_text": True}).json()["items"]
    assert {one["id"]: one["text"] for one in listed} == TEXTS
    assert {one["text"] for one in served.http.get(f"{stored}/items").json()["items"]} == {None}

    asked = {"texts": ["north"], "k": 6}
    bare, told = (
        served.http.post(f"{stored}/query", json={**asked, "with_text": shown}).json()["results"][0]["matches"]
        for shown in (False, True)
    )
    assert {match["id"]: match["text"] for match in told} == TEXTS
    assert [{name: value for name, value in match.items() if name != "text"} for match in told] == bare


def test_a_text_of_which_nothing_can_be_said_is_an_error_and_one_that_is_gone_is_none(
    served: Any, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"texts": ["north"], "k": 6}

    def answers() -> list[Any]:
        listed = [f"{stored}/items", f"{stored}/items:embeddings"]
        pages = [served.http.get(path, params={"with_text": True}) for path in listed]
        return [*pages, served.http.post(f"{stored}/query", json={**asked, "with_text": True})]

    with monkeypatch.context() as patch:
        patch.setattr(served.runtime.blobs, "fetch", raising(StoreUnreachable("the store is away")))
        for answer in (*answers(), served.http.get(f"{stored}/items/one")):
            problem(answer, 503, "store_unreachable")
        assert served.http.post(f"{stored}/query", json=asked).status_code == 200
        assert served.http.get(f"{stored}/items").status_code == 200

    with monkeypatch.context() as patch:
        patch.setattr(served.runtime.blobs, "fetch", lambda _: None)
        pages = [answer.json() for answer in answers()]
        assert {one["text"] for one in pages[0]["items"] + pages[2]["results"][0]["matches"]} == {None}


def test_a_text_takes_the_place_of_what_was_there_and_goes_with_its_item(served: Any, stored: str) -> None:
    files = served.runtime.settings.data / "blobs"
    before = len(list(files.rglob("*.txt")))

    assert post(served, stored, {"one": "north"}).json()["replaced"] == 1
    assert served.http.get(f"{stored}/items/one").json()["text"] == "north"
    problem(post(served, stored, {"one": "east"}, replace=False), 422, "items_refused")
    assert served.http.delete(f"{stored}/items/same").status_code == 204
    assert len(list(files.rglob("*.txt"))) == before - 1


def work_remotely(client: Client, folder: Path) -> None:
    """One chunk."""
    stop = threading.Event()
    worker = RemoteWorker(client, folder, stop)
    done: Callable[..., Any] = worker._finish
    worker._finish = lambda *given: (done(*given), stop.set())[0]  # type: ignore[method-assign]
    worker.work()


@pytest.mark.parametrize("remote", [False, True])
def test_a_backfill_embeds_texts_again_as_items(
    served: Any, reading: dict[str, Version], stored: str, client: Client, tmp_path: Path, remote: bool
) -> None:
    served.deploy(stored, "new")
    estimate = served.http.post(f"{stored}/backfills", json={}, params={"dry_run": True}).json()
    assert (estimate["items"], estimate["sampled"], estimate["without_image"]) == (len(TEXTS), len(TEXTS), 0)
    number = served.backfill(stored, chunk_size=4)
    if remote:
        work_remotely(client, tmp_path)
    served.work()

    assert served.http.get(f"/backfills/{number}").json()["done"] == len(TEXTS)
    assert vectors(served, stored, "new") == expected(reading["new"], TEXTS)
    asked = served.http.post(f"{stored}/query", json={"items": ["one"], "k": 1}).json()["results"][0]
    assert (asked["version"], asked["matches"][0]["id"]) == ("new", "same")


def test_a_remote_worker_embeds_texts_of_a_version_whose_images_have_side_information(
    served: Any, reading: dict[str, Version], client: Client, tmp_path: Path, pictures: list[bytes]
) -> None:
    sided = add_text(
        make_version(tmp_path / "sided", "sided", 6, side_dim=3, edges=[(reading["both"], "truncate")]), WORDS
    )
    assert served.register(sided).status_code == 201
    path = served.gallery("both")
    served.ingest(path, {"image": pictures[0]})
    post(served, path, {"text": "east"})
    served.deploy(path, "sided")
    number = served.backfill(path)

    work_remotely(client, tmp_path / "far")

    assert served.http.get(f"/backfills/{number}").json()["done"] == 2


def test_a_gate_and_like_this_embed_texts(served: Any, stored: str) -> None:
    gate = served.http.post(f"{stored}/gates", json={"version": "new", "label": "label"}).json()
    assert (gate["items"], gate["unreadable"]) == (len(TEXTS), 0)
    assert set(gate["latency_ms"]) == {"old", "new"}
    assert served.http.get(f"{stored}/gates/{gate['id']}/page").status_code == 200

    served.deploy(stored, "new")
    asked = served.http.post(f"{stored}/query", json={"items": ["one"], "k": 1}).json()["results"][0]
    assert (asked["version"], asked["matches"][0]["id"], asked["matches"][0]["route"]) == ("new", "same", ["dual"])


def test_images_and_texts_lie_in_one_gallery(served: Any, reading: dict[str, Version], pictures: list[bytes]) -> None:
    path = served.gallery("both")
    assert served.ingest(path, {f"i{n}": picture for n, picture in enumerate(pictures[:5])}).json()["stored"] == 5
    assert post(served, path, {"east": "east", "north": "north"}).json()["stored"] == 2

    assert served.query(path, pictures[0], k=1).json()["results"][0]["matches"][0]["id"] == "i0"
    found = served.http.post(f"{path}/query", json={"texts": ["north"], "k": 7, "with_text": True}).json()
    texts = {match["id"]: match["text"] for match in found["results"][0]["matches"]}
    assert texts == {"north": "north", "east": "east"} | {f"i{n}": None for n in range(5)}

    served.deploy(path, "new")  # reads no images: they stay where they are
    number = served.backfill(path)
    served.work()
    shown = served.http.get(f"/backfills/{number}").json()
    assert (shown["state"], shown["total"], shown["done"], shown["failed"]) == ("done", 2, 2, 0)
    served.http.post(f"{path}/rollback", json={})
    number = served.backfill(path)  # nothing: `both` said all that it can
    assert served.http.get(f"/backfills/{number}").json()["total"] == 0
    images = Encoder(reading["both"]).encode([decode_image(pictures[0])]).vectors[0]
    assert vectors(served, path, "both")["i0"] == pytest.approx(images, abs=1e-6)


def test_a_form_holds_images_and_texts(served: Any, client: Client, pictures: list[bytes]) -> None:
    path = served.gallery("both")
    listed = [{"id": "a", "text": "north"}, {"id": "b", "image": "0"}, {"id": "c", "text": " "}, {"id": "d"}]
    listed.append({"id": "e", "image": "0", "text": "x"})
    files = [("images", ("0", pictures[0]))]

    answer = served.http.post(f"{path}/items", data={"items": json.dumps(listed)}, files=files).json()

    refused = [(error["id"], error["pointer"]) for error in answer["errors"]]
    assert (answer["new"], refused) == (2, [("c", "/items/2/text"), ("d", "/items/3/image"), ("e", "/items/4/text")])
    shown = served.http.get(f"{path}/items", params={"with_text": True}).json()["items"]
    assert {one["id"]: (one["text"], one["image"]) for one in shown} == {"a": ("north", False), "b": (None, True)}
    for version, told in (("old", "no_encoder"), ("v1", "no_text_entrance")):
        refused = served.http.post(
            f"{served.gallery(version)}/items", data={"items": json.dumps(listed[:2])}, files=files
        )
        assert refused.json()["code"] == told
    both = client.ingest(path.rpartition("/")[2], [TextItem("f", "east"), ImageItem("g", pictures[1], {"a": 1})])
    assert (both.new, client.ingest(path.rpartition("/")[2], [TextItem("h", "east")]).new) == (2, 1)
    alone = served.http.post(
        f"{served.gallery('old')}/items", data={"items": json.dumps(listed[:1])}, files=[("images", ("0", b""))]
    )
    assert alone.json()["stored"] == 1


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "invalid_text"),
        (" \n\t", "invalid_text"),
        (3, "invalid_text"),
        (None, "invalid_text"),
        ("é" * 40_000, "invalid_text"),
        ("\ud800 half", "invalid_text"),
    ],
    ids=lambda value: str(value)[:8].encode("ascii", "replace").decode(),
)
def test_a_bad_text_is_named_and_the_others_are_stored(
    served: Any, reading: dict[str, Version], text: Any, code: str
) -> None:
    path = served.gallery("old")
    body = {"items": [{"id": "good", "text": "east"}, {"id": "bad", "text": text}]}

    answer = served.http.post(f"{path}/items", content=json.dumps(body), headers={"content-type": "application/json"})
    (error,) = answer.json()["errors"]
    assert (answer.json()["stored"], error["code"], error["pointer"]) == (1, code, "/items/1/text")
    assert served.http.get(f"{path}/items").json()["items"][0]["id"] == "good"


@pytest.mark.parametrize(
    ("body", "code", "pointer"),
    [
        ({"items": [{"id": "a", "text": "east"}], "version": "old"}, "invalid_body", "/version"),
        ({"items": [{"id": "a", "text": "east", "image": "a.png"}]}, "items_refused", "/items/0/image"),
    ],
)
def test_what_is_no_batch_of_texts_is_refused(served: Any, stored: str, body: Any, code: str, pointer: str) -> None:
    problem(served.http.post(f"{stored}/items", json=body), 422, code, pointer)


def test_the_origin_of_embeddings_is_none_of_texts(served: Any, stored: str) -> None:
    body = {"items": [{"id": "late", "text": "north"}]}

    refused = served.http.post(f"{stored}/items", json=body, params={"origin": "transformed"})

    problem(refused, 422, "invalid_argument", "/origin")


def test_bytes_that_are_no_utf8_are_refused(served: Any, stored: str) -> None:
    raw = b'{"items": [{"id": "a", "text": "\xff east"}]}'
    answer = served.http.post(f"{stored}/items", content=raw, headers={"content-type": "application/json"})
    problem(answer, 422, "invalid_body")


@pytest.mark.parametrize("version", ["v1", "plain"])
def test_a_version_that_reads_no_texts_refuses_them_once(served: Any, reading: Any, version: str) -> None:
    told = problem(post(served, served.gallery(version), TEXTS), 422, "no_text_entrance")["detail"]
    assert repr(version) in told
    assert "both, new, old" in told


def test_the_text_of_an_embedding_made_elsewhere_is_kept_for_later_versions(
    served: Any, reading: dict[str, Version], client: Client
) -> None:
    path = served.gallery("new")
    name = path.rpartition("/")[2]
    rows = np.eye(4, dtype=np.float32)
    items = [{"id": f"p{n}", "embedding": rows[n], "text": "east north"} for n in range(2)]
    assert client.ingest_embeddings(name, items, version="old").stored == 2
    listed = [{"id": "p2", "embedding": [1] * 6}, {"id": "p3", "embedding": [1] * 6, "text": " "}]
    answer = served.http.post(f"{path}/items", json={"items": listed}).json()
    assert (answer["stored"], answer["errors"][0]["pointer"]) == (1, "/items/1/text")
    assert client.ingest_texts(name, [TextItem("q", "north", {"a": 1})]).new == 1

    number = served.backfill(path)
    served.work()

    assert served.http.get(f"/backfills/{number}").json()["done"] == 2
    made = expected(reading["new"], {"p0": "east north", "p1": "east north", "q": "north"})
    assert {key: row for key, row in vectors(served, path, "new").items() if key != "p2"} == made
    assert served.http.get(f"{path}/items/p0").json()["text"] == "east north"
