"""A provider's API as a text entrance: what it answers is held to the card, what it refuses to answer is told."""

from __future__ import annotations

import email.utils
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.errors import InvalidArgument, InvalidText, InvalidVersionFolder, RegraftError
from index.version import EmbeddingApi, Version
from index.version_folder.card import parse_card
from index.version_folder.folder import load_version
from regraft import Version as Face
from regraft.embedding_api import ProviderApi
from service.registry.encoders import embedding_api
from service.registry.encoders.embedding_api import ApiEncoder, ProviderFault, ProviderTimeout, ProviderUnavailable
from staging.external.provider import DIM, Provider, embedding, fails, providing, slow

KEY = "PROVIDER_API_KEY"
ALLOWED = "http://127.0.0.1/"


@pytest.fixture(scope="module")
def running() -> Iterator[Provider]:
    with providing() as provider:
        yield provider


@pytest.fixture
def provider(running: Provider, monkeypatch: pytest.MonkeyPatch) -> Provider:
    monkeypatch.setenv(KEY, running.key)
    monkeypatch.setattr(embedding_api, "FIRST_PAUSE", 0.01)
    running.script.clear()
    running.requests.clear()
    running.always = None
    return running


def created(provider: Provider, folder: Path, **about: Any) -> Version:
    prompts = {"query": "ask: ", "item": "doc: "}
    api = EmbeddingApi(provider.url, "m", **{"key": KEY, "batch_size": 3, **about})
    return Face.create(folder, ProviderApi(api, DIM, prompts=prompts))


@pytest.fixture
def version(provider: Provider, tmp_path: Path) -> Version:
    made = created(provider, tmp_path / "api")
    provider.requests.clear()
    return made


@pytest.fixture
def encoder(provider: Provider, version: Version) -> Iterator[ApiEncoder]:
    made = ApiEncoder(version, [provider.url])
    made.vectors([])  # compares with the probe
    provider.requests.clear()
    yield made
    made.close()


@pytest.mark.parametrize("about", [{}, {"encoding": "base64"}, {"shorten": True}, {"batch_size": 100}])
def test_texts_are_embedded_in_batches_with_their_prompts(provider: Provider, tmp_path: Path, about: Any) -> None:
    made = created(provider, tmp_path / "api", **about)
    encoder = ApiEncoder(load_version(made.folder), [provider.url])
    provider.requests.clear()
    texts = [f"text {n}" for n in range(7)]

    rows = encoder.vectors([encoder.prepare(text, "item") for text in texts])

    np.testing.assert_allclose(rows, [embedding(f"doc: {text}") for text in texts], atol=1e-6)
    sizes = [len(request["input"]) for request in provider.requests]
    assert sizes == ([1, 7] if about.get("batch_size") == 100 else [1, 3, 3, 1])  # the first one is the probe
    assert {request.get("dimensions") for request in provider.requests} == {DIM if about.get("shorten") else None}
    assert encoder.tokens == sum(len(text.split()) for text in provider.inputs)
    np.testing.assert_allclose(encoder.query_vectors([encoder.prepare("x")])[0], embedding("ask: x"), atol=1e-6)
    told = made.card.metrics["probe"]
    assert (told["checked"], told["inputs"] > 10, told["largest_difference"]) == (True, True, 0.0)


def test_what_may_go_better_is_tried_again_and_a_pause_that_was_asked_for_is_kept(
    provider: Provider, encoder: ApiEncoder
) -> None:
    # A date has whole seconds: one that was is no pause.
    provider.script = [fails(429, retry_after="0.2"), fails(503), fails(500, retry_after=email.utils.formatdate())]
    started = time.monotonic()
    np.testing.assert_allclose(encoder.vectors(["a"]), [embedding("a")], atol=1e-6)
    assert (len(provider.requests), time.monotonic() - started > 0.2) == (4, True)


@pytest.mark.parametrize("pause", ["nan", "-1", "soon", ""])
def test_a_pause_that_is_none_is_not_kept(provider: Provider, encoder: ApiEncoder, pause: str) -> None:
    provider.script = [fails(429, retry_after=pause)]
    np.testing.assert_allclose(encoder.vectors(["a"]), [embedding("a")], atol=1e-6)
    assert len(provider.requests) == 2


@pytest.mark.parametrize("wrong", [fails(429, retry_after="3600"), *[fails(status) for status in (401, 403, 404, 301)]])
def test_what_will_not_go_better_is_told_at_once(provider: Provider, encoder: ApiEncoder, wrong: Any) -> None:
    provider.always = wrong
    with pytest.raises(ProviderUnavailable, match="status"):
        encoder.vectors(["a"])
    assert len(provider.requests) == 1


def test_a_refusal_for_now_says_what_a_429_means_and_the_pause_that_was_asked_for(
    provider: Provider, encoder: ApiEncoder
) -> None:
    provider.always = fails(429, retry_after="3600")
    with pytest.raises(ProviderUnavailable) as told:
        encoder.vectors(["a"])
    why = "answered status 429 (too many requests, or a quota is used up); it asks to wait 3600 seconds"
    assert str(told.value) == f"{provider.url} {why}"


def test_a_provider_that_stays_away_is_given_up_and_a_query_waits_only_so_long(
    provider: Provider, encoder: ApiEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.always = fails(500)
    with pytest.raises(ProviderUnavailable, match="500"):
        encoder.vectors(["a"])
    assert len(provider.requests) == embedding_api.MAX_ATTEMPTS

    monkeypatch.setattr(embedding_api, "QUERY_SECONDS", 0.2)
    provider.always = slow(1.0)
    started = time.monotonic()
    with pytest.raises(ProviderTimeout):
        encoder.query_vectors(["a"])
    assert time.monotonic() - started < 0.9


@pytest.mark.parametrize(
    "begun", [b"HTTP/1.1 ", b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"]
)
def test_a_provider_that_answers_byte_by_byte_is_not_waited_for(
    version: Version, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit of each read would never be reached."""
    monkeypatch.setattr(embedding_api, "QUERY_SECONDS", 0.3)
    with dripping(begun) as url:
        assert version.card.api is not None
        card = replace(version.card, api=replace(version.card.api, url=url), files={})
        with closing(ApiEncoder(Version(card, version.folder), [url])) as encoder:
            started = time.monotonic()
            with pytest.raises(ProviderTimeout, match=url):
                encoder.query_vectors(["a"])
            assert time.monotonic() - started < 2


@contextmanager
def dripping(begun: bytes) -> Iterator[str]:
    """The URL of a server that begins to answer so, and then sends a byte every 50 ms for five seconds."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):  # the client is gone
            connection.sendall(begun)
            for _ in range(100):
                connection.sendall(b"2")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        thread.join()


def _without(rows: list[Any], number: int, **changed: Any) -> list[Any]:
    return [{**row, **changed} if n == number else row for n, row in enumerate(rows)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda body, rows: rows[:-1],
        lambda body, rows: [*rows, rows[0]],
        lambda body, rows: _without(rows, 1, index=0),
        lambda body, rows: _without(rows, 1, index="1"),
        lambda body, rows: _without(rows, 1, embedding=[1.0] * (DIM - 1)),
        lambda body, rows: [{**row, "embedding": [1.0] * (DIM + 1)} for row in rows],
        lambda body, rows: _without(rows, 1, embedding=[float("nan")] * DIM),
        lambda body, rows: _without(rows, 1, embedding=[1e39] * DIM),
        lambda body, rows: _without(rows, 1, embedding=[0.0] * DIM),
        lambda body, rows: _without(rows, 1, embedding=["1"] * DIM),
        lambda body, rows: _without(rows, 1, embedding="%%%"),
        lambda body, rows: _without(rows, 1, embedding=None),
        lambda body, rows: [{"embedding": [1.0] * DIM}] * 3,
        lambda body, rows: {"object": "list"},
        lambda body, rows: (200, {}, b"<html>"),
        lambda body, rows: (200, {}, b"[" * 100_000),
        lambda body, rows: (200, {}, b'"' + b"x" * 300_000 + b'"'),
        lambda body, rows: (200, {}, []),
    ],
)
def test_what_is_no_answer_to_these_texts_is_no_embedding(provider: Provider, encoder: ApiEncoder, wrong: Any) -> None:
    provider.always = wrong
    with pytest.raises(ProviderFault):
        encoder.vectors(["a", "b", "c"])
    assert len(provider.requests) == 1
    provider.always = lambda body, rows: rows[::-1]
    np.testing.assert_allclose(encoder.vectors(["a", "b"]), [embedding("a"), embedding("b")], atol=1e-6)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_text_that_the_provider_refuses_is_at_fault(provider: Provider, encoder: ApiEncoder, status: int) -> None:
    provider.always = lambda body, rows: (status, {}, {"error": f"too long; you sent {provider.key}"})
    with pytest.raises(InvalidText, match="too long") as refused:
        encoder.vectors(["a"])
    assert provider.key not in str(refused.value)


def test_the_key_is_read_where_it_is_needed_and_told_to_nobody(
    provider: Provider, encoder: ApiEncoder, version: Version, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(KEY, "another-secret")
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ProviderUnavailable, match=f"check the key in {KEY}") as refused:
        encoder.vectors(["a"])
    for unset in ("", "with\nbreak"):
        monkeypatch.setenv(KEY, unset)
        with pytest.raises(ProviderUnavailable, match=KEY):
            encoder.vectors(["a"])
    written = "".join(path.read_text() for path in version.folder.rglob("*.json"))
    assert "secret" not in caplog.text + str(refused.value) + written


def test_another_model_behind_the_same_name_is_noticed(provider: Provider, version: Version) -> None:
    provider.always = lambda body, rows: [{**row, "embedding": [-x for x in row["embedding"]]} for row in rows]
    encoder = ApiEncoder(version, [provider.url])
    with pytest.raises(ProviderFault, match="model has changed"):
        encoder.vectors(["a"])
    provider.always = lambda body, rows: [{**row, "embedding": [x + 1e-3 for x in row["embedding"]]} for row in rows]
    assert encoder.vectors(["a"]).shape == (1, DIM)


def test_no_text_is_at_fault_where_the_probe_is_refused(provider: Provider, version: Version) -> None:
    """A model that the provider withdrew may be a 400 for every text."""
    provider.always = fails(400)
    with pytest.raises(ProviderFault, match=r"the probe of version 'api' was embedded at its creation, but now .*400"):
        ApiEncoder(version, [provider.url]).vectors(["a"])


def test_only_urls_that_are_listed_are_called(provider: Provider, version: Version) -> None:
    with pytest.raises(ProviderUnavailable, match="REGRAFT_EMBEDDING_APIS"):
        ApiEncoder(version, [ALLOWED, provider.url + "/other"])
    assert provider.requests == []


@pytest.mark.parametrize("limits", [{"requests_per_minute": 600}, {"tokens_per_minute": 24_000}])
def test_limits_are_kept_over_threads(provider: Provider, version: Version, limits: Any) -> None:
    api = replace(version.card.api, **limits)  # type: ignore[type-var]
    encoder = ApiEncoder(Version(replace(version.card, api=api, files={}), version.folder), [provider.url])
    text = "x " * 100  # about 50 tokens; 100 by what the provider counts
    started = time.monotonic()
    threads = [threading.Thread(target=encoder.vectors, args=([text],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (time.monotonic() - started > 0.25, len(provider.requests)) == (True, 4)


def test_a_version_is_made_while_the_provider_is_away_and_says_so(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY)
    made = created(provider, tmp_path / "api")
    assert (made.card.metrics["probe"]["checked"], list(made.card.files)) == (False, [])
    monkeypatch.setenv(KEY, provider.key)
    assert ApiEncoder(made, [provider.url]).vectors(["a"]).shape == (1, DIM)


def test_a_provider_that_answers_wrongly_makes_no_version(provider: Provider, tmp_path: Path) -> None:
    def swapped(body: Any, rows: list[Any]) -> list[Any]:
        return [{**row, "index": len(rows) - 1 - row["index"]} for row in rows]

    for wrong in (swapped, lambda body, rows: [{**row, "embedding": [1.0] * 4} for row in rows]):
        provider.always = wrong
        with pytest.raises(ProviderFault):
            created(provider, tmp_path / "api", batch_size=100)
        assert not (tmp_path / "api").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "ftp://host/v1"),
        ("url", "https://user:pass@host/v1"),
        ("url", "https://host/v1?key=1"),
        ("url", "https://host/v1/"),
        ("url", "https:///v1"),
        ("url", "https://[::1/v1"),
        ("url", "https://[host]/v1"),
        ("url", "https://host:port/v1"),
        ("url", "https://host:99999/v1"),
        ("model", ""),
        ("key", "REGRAFT_API_KEY"),
        ("key", "sk-abc"),
        ("batch_size", 0),
        ("requests_per_minute", 0),
        ("price", "1"),
        ("encoding", "int8"),
        ("shorten", 1),
        ("other", 1),
    ],
)
def test_a_card_names_an_api_completely(field: str, value: Any) -> None:
    card = {"format": 1, "name": "a", "dim": 2, "space": {"kind": "cosine"}}
    api = {"url": "https://host:8443/v1", "model": "m"}
    assert parse_card({**card, "api": api}).api == EmbeddingApi(**api)
    with pytest.raises(InvalidVersionFolder, match=f"api/{field}"):
        parse_card({**card, "api": {**api, field: value}})


def test_creation_says_what_is_missing(provider: Provider, tmp_path: Path) -> None:
    api = EmbeddingApi("https://host/v1/", "m")
    with pytest.raises(RegraftError, match="url"):
        Face.create(tmp_path / "x", ProviderApi(api, 3))
    with pytest.raises(InvalidArgument):
        Face.create(tmp_path / "y", ProviderApi(EmbeddingApi(provider.url, "m"), 3, {"kind": "none"}))
