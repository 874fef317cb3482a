"""A version whose encoder is a provider's API: texts go in, a backfill moves them, queries are answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.version import EmbeddingApi
from regraft import Version
from regraft.client import Client
from regraft.embedding_api import ProviderApi
from regraft.remote_folders import RemoteVersion
from service.registry.encoders import embedding_api
from service.settings import Settings
from staging.api.served import Served, problem, serving
from staging.external.provider import DIM, Provider, embedding, fails, providing
from staging.inputs.builders import add_text, make_version
from staging.shortcuts import migrated_once, verified_here

TEXTS = {f"t{n}": f"word{n} word{n % 3} all" for n in range(40)}


@pytest.fixture(scope="module")
def running() -> Iterator[Provider]:
    with providing() as provider:
        yield provider


@pytest.fixture(scope="module")
def site(running: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`local` reads texts by itself, `one` and `two` by the provider; `elsewhere` by one that nobody listed."""
    root = tmp_path_factory.mktemp("provider")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROVIDER_API_KEY", running.key)
        patch.setattr(embedding_api, "FIRST_PAUSE", 0.01)
        with verified_here(), migrated_once(), serving(Settings(data=root, embedding_apis=f"{running.url}/,x")) as made:
            local = make_version(root / "local", "local", 4, encoder=False)
            assert made.register(add_text(local, {"all": np.eye(1, 4)[0]})).status_code == 201
            for name, model, url in (("one", "m", ""), ("two", "n", ""), ("elsewhere", "m", "/other")):
                api = EmbeddingApi(running.url + url, model, "PROVIDER_API_KEY", batch_size=16, price=2.0)
                patch.setenv("PROVIDER_API_KEY", "" if url else running.key)
                version = Version.create(root / "made" / name, ProviderApi(api, DIM, prompts={"item": "doc: "}))
                assert made.register(version).status_code == 201
            patch.setenv("PROVIDER_API_KEY", running.key)
            yield made


@pytest.fixture
def provider(running: Provider) -> Iterator[Provider]:
    running.requests.clear()
    running.script.clear()
    running.always = None
    yield running
    running.always = None


def stored(site: Any, version: str) -> str:
    path = site.gallery(version)
    items = [{"id": key, "text": text} for key, text in TEXTS.items()]
    assert site.http.post(f"{path}/items", json={"items": items}).json()["stored"] == len(TEXTS)
    return path


def ask(site: Any, path: str, text: str = "word7") -> Any:
    return site.http.post(f"{path}/query", json={"texts": [text], "k": 1})


def test_texts_are_stored_moved_and_found_by_the_provider(site: Any, provider: Provider) -> None:
    path = stored(site, "local")
    site.deploy(path, "one")
    told = site.http.post(f"{path}/backfills", json={}, params={"dry_run": True}).json()
    tokens = told["tokens"] / len(TEXTS)
    assert (told["items"], tokens, told["price"]) == (40, pytest.approx(4), pytest.approx(40 * 4 * 2 / 1e6))
    provider.requests.clear()

    provider.script = [fails(429, retry_after="0.05"), fails(500)]
    number = site.backfill(path, chunk_size=20)
    site.work()

    assert site.http.get(f"/backfills/{number}").json()["done"] == len(TEXTS)
    sent = [text for text in provider.inputs if text.startswith("doc: ")]
    assert sorted(set(sent)) == sorted(f"doc: {text}" for text in TEXTS.values())
    page = site.http.get(f"{path}/items:embeddings", params={"versions": "one"}).json()["items"]
    for item in page:
        expected = embedding(f"doc: {TEXTS[item['id']]}")
        assert item["embeddings"][0]["embedding"] == pytest.approx(expected, abs=1e-6)
    match = ask(site, path, "doc: word7 word1 all").json()["results"][0]["matches"][0]
    assert (match["id"], match["version"], match["score"]) == ("t7", "one", pytest.approx(1.0, abs=1e-5))


def test_items_of_one_provider_are_reached_from_the_next_by_its_old_model(site: Any, provider: Provider) -> None:
    path = stored(site, "one")
    gate = site.http.post(f"{path}/gates", json={"version": "two"}).json()
    assert (gate["items"], gate["unreadable"]) == (len(TEXTS), 0)
    site.deploy(path, "two")
    answer = ask(site, path, "doc: word7 word1 all").json()
    assert (answer["version"], answer["degraded"]) == ("two", [])
    assert (answer["results"][0]["matches"][0]["id"], answer["results"][0]["matches"][0]["route"]) == ("t7", ["dual"])


def test_vectors_made_elsewhere_are_known_as_the_providers_by_their_texts(
    site: Any, provider: Provider, tmp_path: Path
) -> None:
    assert site.register(make_version(tmp_path / "kept", "kept", DIM, encoder=False)).status_code == 201
    path = site.gallery("kept")
    items = [{"id": i, "text": t, "embedding": embedding(f"doc: {t}").tolist()} for i, t in TEXTS.items()]
    assert site.http.post(f"{path}/items", json={"version": "kept", "items": items}).json()["failed"] == 0
    provider.requests.clear()

    def claim(new: str, count: int) -> Any:
        verify = {"gallery": path.rpartition("/")[2], "items": count}
        return site.http.post("/edges", json={"new": new, "old": "kept", "kind": "identity", "verify": verify})

    problem(claim("one", 41), 422, "nothing_to_verify_on", "/verify/items")
    problem(claim("two", 10), 422, "not_identical", "/kind")
    provider.requests.clear()
    claimed = claim("one", 10)

    assert claimed.status_code == 201, claimed.text
    assert (claimed.json()["made"]["items"]["images"], claimed.json()["scores"]["cmc@1"]["value"]) == (10, 1.0)
    assert len(provider.inputs) == len(set(provider.inputs)) == 10


@pytest.mark.parametrize(
    ("wrong", "status", "code"),
    [
        (fails(401), 503, "provider_unavailable"),
        (fails(503), 503, "provider_unavailable"),
        (lambda body, rows: rows[:-1], 502, "provider_fault"),
        (fails(400), 422, "invalid_text"),
    ],
)
def test_a_query_says_that_the_provider_is_at_fault(
    site: Any, provider: Provider, caplog: pytest.LogCaptureFixture, wrong: Any, status: int, code: str
) -> None:
    path = stored(site, "one")
    provider.always = wrong
    told = problem(ask(site, path), status, code)
    logged = [record.msg.fields for record in caplog.records if str(record.msg).startswith("action=request_refused")]
    expected = {"method": "POST", "path": f"/v1{path}/query", "status": status, "code": code, "reason": told["detail"]}
    assert logged == [expected | {"request": told["request_id"]}] * (status >= 500)
    assert provider.url in told["detail"]
    assert provider.key not in str(told)
    items = {"items": [{"id": "new", "text": "east"}]}
    assert site.http.post(f"{path}/items", json=items).status_code == status
    provider.always = None
    assert ask(site, path).status_code == 200
    assert site.http.get(f"{path}/items/new").status_code == 404


def test_a_provider_that_is_away_fails_no_item_of_a_backfill(site: Any, provider: Provider) -> None:
    path = stored(site, "local")
    site.deploy(path, "one")
    number = site.backfill(path, chunk_size=40)
    provider.always = fails(503)
    site.work(1)
    shown = site.http.get(f"/backfills/{number}").json()
    assert (shown["state"], shown["done"], shown["failed"]) == ("running", 0, 0)
    site.http.post(f"/backfills/{number}/cancel")


def test_a_text_that_the_provider_refuses_fails_alone(site: Any, provider: Provider) -> None:
    path = stored(site, "local")
    site.deploy(path, "one")
    number = site.backfill(path)

    def picky(body: dict[str, Any], rows: Any) -> Any:
        return (400, {}, {"error": "too long"}) if any("word33 " in text for text in body["input"]) else None

    provider.always = picky
    site.work()
    shown = site.http.get(f"/backfills/{number}").json()
    assert (shown["state"], shown["done"], shown["failed"]) == ("done", len(TEXTS) - 1, 1)
    (failure,) = site.http.get(f"/backfills/{number}/failures").json()["failures"]
    assert (failure["item"], "too long" in failure["reason"]) == ("t33", True)


def test_a_url_that_nobody_listed_is_never_called(site: Any, provider: Provider) -> None:
    path = site.gallery("elsewhere")
    told = problem(
        site.http.post(f"{path}/items", json={"items": [{"id": "a", "text": "b"}]}), 503, "provider_unavailable"
    )
    assert "REGRAFT_EMBEDDING_APIS" in told["detail"]
    assert provider.requests == []


def test_a_remote_worker_calls_the_provider_itself(site: Any, provider: Provider, tmp_path: Path) -> None:
    version = site.runtime.registry.named("one").version
    remote = RemoteVersion(0, version, "", site.runtime.settings.execution, [provider.url])
    entrance = remote.text_encoder()
    assert entrance.vectors([entrance.prepare("a", "item")])[0] == pytest.approx(embedding("doc: a"), abs=1e-6)
    with Client(site.url) as client:
        assert client.version("one").text
