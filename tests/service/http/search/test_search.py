from __future__ import annotations

import gzip
import logging
import threading
import traceback
from typing import Any

import httpx
import numpy as np
import pytest

import service.http.search.request
import service.http.search.search
from index.encoders.encoder import Encoder
from index.encoders.image import decode_image
from index.engines.memory.flat import FlatShard
from index.version import Version
from service.http.search import query_route, search
from service.http.search.search import respond
from staging.api.served import ids, problem
from staging.inputs.builders import make_version
from staging.waiting import until


@pytest.fixture(scope="module")
def filled(served: Any, pictures: list[bytes]) -> str:
    """A gallery of v1 with every picture, item n of label n % 5."""
    path: str = served.gallery()
    items = [{"id": f"i{n}", "metadata": {"label": n % 5}, "image": f"{n}"} for n in range(20)]
    assert served.post_items(path, items, [(f"{n}", p) for n, p in enumerate(pictures)]).status_code == 200
    return path


def test_images_find_items_in_the_exact_order(
    served: Any, filled: str, pictures: list[bytes], versions: dict[str, Version]
) -> None:
    vectors = Encoder(versions["v1"]).encode([decode_image(picture) for picture in pictures]).vectors
    expected = np.argsort(-(vectors @ vectors.T), axis=1, kind="stable")

    answered = served.query(filled, *pictures, k=20)

    assert ids(answered) == [[f"i{n}" for n in row] for row in expected]
    answer = answered.json()
    assert {key: answer[key] for key in ("version", "k", "mode", "mix", "degraded")} == {
        "version": "v1",
        "k": 20,
        "mode": "raw",
        "mix": {"v1": 20},
        "degraded": [],
    }
    assert answer["took_ms"] > 0
    best = answer["results"][7]["matches"][0]
    assert best.pop("score") == best.pop("raw_score") == pytest.approx(1)
    assert best == {"id": "i7", "version": "v1", "origin": "encoded", "route": [], "metadata": {"label": 2}}


def test_embeddings_find_what_their_images_find(
    served: Any, filled: str, pictures: list[bytes], versions: dict[str, Version]
) -> None:
    vectors = Encoder(versions["v1"]).encode([decode_image(picture) for picture in pictures]).vectors
    body = {"version": "v1", "embeddings": (3 * vectors).tolist(), "k": 4}

    answered = served.http.post(f"{filled}/query", json=body)

    assert ids(answered) == ids(served.query(filled, *pictures, k=4))


def test_k_defaults_to_ten(served: Any, filled: str, pictures: list[bytes]) -> None:
    assert len(ids(served.query(filled, pictures[0]))[0]) == 10


def test_fewer_items_than_k_are_fewer_matches(served: Any, filled: str, pictures: list[bytes]) -> None:
    few = served.gallery()
    served.ingest(few, {f"i{n}": pictures[n] for n in range(3)})

    assert {len(row) for row in ids(served.query(few, *pictures[:2]))} == {3}
    answer = served.query(filled, pictures[0], k=1000)
    assert len(ids(answer)[0]) == 20
    assert (answer.json()["k"], answer.json()["next"]) == (1000, None)


@pytest.mark.parametrize("k", [0, -1, 10**9, 10**30])
def test_k_is_at_least_one_and_bounded(served: Any, filled: str, pictures: list[bytes], k: int) -> None:
    problem(served.query(filled, pictures[0], k=k), 422, "invalid_argument", "/k")

    body = {"version": "v1", "embeddings": [[1, 2, 3, 4]], "k": k}
    problem(served.http.post(f"{filled}/query", json=body), 422, "invalid_argument", "/k")


def test_an_empty_gallery_answers_legal_queries_that_nothing_matches(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()

    vectors = {"version": "v1", "embeddings": [[1, 2, 3, 4], [4, 3, 2, 1]], "explain": True}
    for answer in (served.query(path, *pictures[:2]), served.http.post(f"{path}/query", json=vectors)):
        assert answer.status_code == 200, answer.text
        assert [result["matches"] for result in answer.json()["results"]] == [[], []]
        assert (answer.json()["next"], answer.json()["degraded"], answer.json()["mix"]) == (None, [], {})
    problem(served.query(path, b"no image"), 422, "invalid_image", "/images/0")
    problem(served.query(path, pictures[0], k=0), 422, "invalid_argument", "/k")


def test_few_functions_lie_between_the_route_and_the_scan(
    served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, scan = [], FlatShard.search

    def spy(*args: Any) -> Any:
        paths.append([frame.name for frame in traceback.extract_stack()])
        return scan(*args)

    monkeypatch.setattr(FlatShard, "search", spy)
    served.query(filled, pictures[0])

    ((*path, _),) = paths
    assert len(path[path.index("respond") :]) + 1 <= 6, path


def test_a_gallery_without_current_version_answers_no_images(served: Any, pictures: list[bytes]) -> None:
    response = served.query(served.gallery(None), pictures[0], k=1)

    assert response.status_code in (409, 422)
    problem(response, response.status_code, response.json()["code"])


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"k": "x"}, "/k"),
        ({"k": ""}, "/k"),
        ({"k": "1.5"}, "/k"),
        ({"k": "²"}, "/k"),
        ({"strict": "maybe"}, "/strict"),
        ({"explain": "1"}, "/explain"),
        ({"mode": "best"}, "/mode"),
        ({"mode": ""}, "/mode"),
        ({"j": "1"}, "/j"),
    ],
    ids=str,
)
def test_a_bad_field_of_the_form_is_named(
    served: Any, filled: str, pictures: list[bytes], fields: dict[str, str], pointer: str
) -> None:
    problem(served.query(filled, pictures[0], **fields), 422, "invalid_body", pointer)


@pytest.mark.parametrize(
    ("body", "code", "pointer"),
    [
        ({"k": "3"}, "invalid_body", "/k"),
        ({"k": 3.0}, "invalid_body", "/k"),
        ({"k": True}, "invalid_body", "/k"),
        ({"k": None}, "invalid_body", "/k"),
        ({"strict": 1}, "invalid_body", "/strict"),
        ({"explain": "true"}, "invalid_body", "/explain"),
        ({"mode": "best"}, "invalid_body", "/mode"),
        ({"mode": 1}, "invalid_body", "/mode"),
        ({"mode": ["raw"]}, "invalid_body", "/mode"),
        ({"threshold": "0.5"}, "invalid_body", "/threshold"),
        ({"threshold": True}, "invalid_body", "/threshold"),
        ({"filter": "x"}, "invalid_filter", "/filter"),
        ({"version": None}, "invalid_body", "/version"),
        ({"version": "v9"}, "unknown_version", "/version"),
        ({"limit": 1}, "invalid_body", "/limit"),
        ({"embeddings": []}, "invalid_vector", "/embeddings"),
        ({"embeddings": None}, "invalid_vector", "/embeddings"),
        ({"embeddings": [1, 2, 3, 4]}, "invalid_vector", "/embeddings/0"),
        ({"embeddings": [[1, 2, 3, 4], [1, 2, 3]]}, "invalid_vector", "/embeddings/1"),
        ({"embeddings": [[1, 2, 3, 4], [0, 0, 0, 0]]}, "invalid_vector", "/embeddings/1"),
        ({"embeddings": [[1, 2, 3, 1e300]]}, "invalid_vector", "/embeddings/0"),
        ({"embeddings": [[1, 2, 3, "4"]]}, "invalid_vector", "/embeddings/0"),
    ],
    ids=str,
)
def test_a_bad_field_of_the_json_is_named(
    served: Any, filled: str, body: dict[str, Any], code: str, pointer: str
) -> None:
    complete = {"version": "v1", "embeddings": [[1, 2, 3, 4]], "k": 1}

    response = served.http.post(f"{filled}/query", json={**complete, **body})

    problem(response, 404 if code == "unknown_version" else 422, code, pointer)


def test_nan_is_no_json(served: Any, filled: str) -> None:
    body = '{"version": "v1", "k": 1, "embeddings": [[1, 2, 3, NaN]]}'
    headers = {"content-type": "application/json"}

    problem(served.http.post(f"{filled}/query", content=body, headers=headers), 422, "invalid_body")


@pytest.mark.parametrize("route", ["query", "items", "deployments"])
def test_a_compressed_body_is_refused_as_one(served: Any, filled: str, route: str) -> None:
    """The first two read their bodies themselves, the third is read by the framework."""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    body = gzip.compress(b'{"version": "v1", "items": ["i3"]}')

    told = problem(served.http.post(f"{filled}/{route}", content=body, headers=headers), 415, "unsupported_media_type")

    assert told["detail"] == "the body must not be compressed; its Content-Encoding is 'gzip'"
    plain = served.http.post(f"{filled}/query", json={"items": ["i3"]}, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_a_bad_query_image_is_named_by_its_number(served: Any, filled: str, pictures: list[bytes]) -> None:
    problem(served.query(filled, pictures[0], b"no image", k=1), 422, "invalid_image", "/images/1")
    problem(served.query(filled, k=1), 415, "unsupported_media_type")
    empty = served.http.post(f"{filled}/query", data={"k": "1"}, files={"other": b"x"})
    problem(empty, 422, "invalid_body", "/other")


def test_there_is_a_largest_number_of_queries_and_of_matches(
    served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {"version": "v1", "k": 1, "embeddings": [[1, 2, 3, 4]] * 101}
    problem(served.http.post(f"{filled}/query", json=many), 413, "body_too_large", "/embeddings")
    problem(served.query(filled, *[pictures[0]] * 101, k=1), 413, "body_too_large", "/images")

    few = service.http.search.request._check_size
    monkeypatch.setattr(
        service.http.search.request, "_check_size", lambda queries, offset, k, most: few(queries, offset, k, 30)
    )
    problem(served.query(filled, pictures[0], pictures[1], k=16), 422, "invalid_argument", "/k")
    assert served.query(filled, pictures[0], pictures[1], k=15).status_code == 200


def test_a_version_can_ask_as_soon_as_it_is_registered(
    served: Any, pictures: list[bytes], versions: dict[str, Version], tmp_path: Any
) -> None:
    path = served.gallery("v1")
    served.ingest(path, {"a": pictures[0], "b": pictures[1]})
    later = make_version(tmp_path / "later", "later", 4, edges=[(versions["v1"], "identity")])
    assert served.register(later).status_code == 201

    asked = {"version": "later", "embeddings": [[1, 2, 3, 4]], "k": 2}
    answer = served.http.post(f"{path}/query", json=asked).json()

    assert answer["degraded"] == []
    assert [m["route"] for m in answer["results"][0]["matches"]] == [["identity"], ["identity"]]


def test_queries_are_whole_while_versions_change_and_items_come_and_go(served: Any, pictures: list[bytes]) -> None:
    path = served.filled(pictures)
    stop = threading.Event()
    failures: list[str] = []
    answers: list[int] = []

    def ask() -> None:
        while not stop.is_set():
            response = served.query(path, pictures[len(answers) % 20], k=5)
            answers.append(response.status_code)
            wrong = response.status_code != 200 or response.json()["degraded"] or len(ids(response)[0]) != 5
            if wrong:
                failures.append(response.text)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(4):
        served.deploy(path, "v2")
        served.ingest(path, {f"x{turn}": pictures[turn], f"i{turn}": pictures[turn]})
        served.http.delete(f"{path}/items/x{turn}")
        assert served.http.post(f"{path}/rollback", json={}).status_code == 201
    stop.set()
    for thread in threads:
        thread.join()

    assert failures == []
    assert len(answers) > 5
    assert served.http.get(path).json()["items"] == 20


@pytest.mark.parametrize("asked", ["form", "json"])
def test_a_query_whose_client_left_before_a_thread_began_it_is_not_answered(
    asked: str,
    served: Any,
    filled: str,
    pictures: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answered: list[str] = []

    def noted(service: Any, name: str, *more: Any) -> Any:
        answered.append(name)
        return respond(service, name, *more)

    def ask(**options: Any) -> httpx.Response:
        if asked == "json":
            return served.http.post(f"{filled}/query", json={"items": ["i0"]}, **options)
        return served.http.post(f"{filled}/query", files={"images": pictures[0]}, **options)

    monkeypatch.setattr(search, "respond", noted)
    monkeypatch.setattr(query_route, "respond", noted)
    caplog.set_level(logging.DEBUG, "service.http.server.auth")
    released = threading.Event()
    try:
        for _ in range(served.runtime.settings.threads):
            served.runtime.blocking_threads.submit(released.wait)
        with pytest.raises(httpx.ReadTimeout):
            ask(timeout=0.2)
        until(lambda: "client_left" in caplog.text)
    finally:
        released.set()

    assert ask().status_code == 200
    assert len(answered) == 1
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_a_client_that_leaves_while_a_thread_reads_its_images_is_no_failure(
    served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()

    def slowly(*given: Any) -> Any:
        try:
            until(lambda: "client_left" in caplog.text)
            return respond(*given)
        finally:
            ended.set()

    caplog.set_level(logging.DEBUG, "service.http.server.auth")
    with monkeypatch.context() as slow:
        slow.setattr(search, "respond", slowly)
        with pytest.raises(httpx.ReadTimeout):
            served.http.post(f"{filled}/query", files={"images": pictures[0]}, timeout=0.2)
        assert ended.wait(30)

    assert served.query(filled, pictures[0]).status_code == 200
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
