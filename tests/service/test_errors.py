from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from index.errors import MAX_SHOWN, RegraftError
from index.item_id import MAX_ID
from service.http.bodies.arrow import ARROW
from staging.api.served import problem

LONG = "long" * 2_000


def test_an_unknown_route_is_a_problem(served: Any) -> None:
    problem(served.http.get("/nowhere"), 404, "not_found")
    problem(served.http.get("/../nowhere"), 404, "not_found")


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/galleries", "GET, POST"),
        ("/galleries/g/items/i", "DELETE, GET"),
        ("/galleries/g/items/i/image", "GET"),
        ("/edges:fit", "POST"),
        ("/health", "GET"),
    ],
)
def test_a_wrong_method_is_a_problem_that_names_the_right_ones(served: Any, path: str, methods: str) -> None:
    response = served.http.put(path)

    problem(response, 405, "method_not_allowed")
    assert response.headers["allow"] == methods


def test_a_wrong_media_type_is_a_problem(served: Any) -> None:
    path = served.gallery()

    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        for route in ("items", "query"):
            detail = problem(
                served.http.post(f"{path}/{route}", content=b"a=1", headers=headers), 415, "unsupported_media_type"
            )["detail"]
            assert "application/json or multipart/form-data" in detail
            assert ("application/x-npy" in detail) is (route == "query")


@pytest.mark.parametrize(
    ("content", "code", "pointer"),
    [
        (b'{"name": ', "invalid_body", None),
        (b"\xff", "invalid_body", None),
        (b"[" * 100_000, "invalid_body", None),
        (b"[]", "invalid_request", ""),
        (b"", "invalid_request", ""),
        (b"{}", "invalid_request", "/name"),
        (b'{"name": NaN}', "invalid_body", None),
        (b'{"name": 7}', "invalid_request", "/name"),
        (b'{"name": "a", "b/~c": 1}', "invalid_request", "/b~1~0c"),
        (b'{"name": "a", "b\\ud800": 1}', "invalid_body", None),
        (b'{"name": "a\\ud800"}', "invalid_body", None),
        (b"{" + b",".join(b'"%d": 1' % n for n in range(101)) + b"}", "invalid_request", ""),
        (b'{"name": ""}', "invalid_argument", "/name"),
        (b'{"name": "a b"}', "invalid_argument", "/name"),
        (b'{"name": "../a"}', "invalid_argument", "/name"),
    ],
)
def test_a_bad_body_is_a_problem_that_names_the_field(
    served: Any, content: bytes, code: str, pointer: str | None
) -> None:
    response = served.http.post("/galleries", content=content, headers={"content-type": "application/json"})

    assert response.status_code in (400, 422)
    problem(response, response.status_code, code, pointer)


def test_a_bad_parameter_is_a_problem_that_names_it(served: Any) -> None:
    path = served.gallery()

    for limit in ("0", "1001", "x", ""):
        problem(served.http.get(f"{path}/items", params={"limit": limit}), 422, "invalid_request", "/limit")
    problem(served.http.get(f"{path}/items", params={"cursor": "?"}), 422, "invalid_argument", "/cursor")
    problem(served.http.post(f"{path}/items", params={"atomic": "x"}), 422, "invalid_request", "/atomic")


def described(served: Any) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(str(served.http.base_url).replace("/v1/", "/openapi.json")).json()["paths"]
    return found


def operations(served: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """Method, path below /v1 and description of each route; numbers of paths are 1, names "a"."""
    return [
        (method, re.sub(r"{\w+}", "a", re.sub(r"{(number|chunk)}", "1", path.removeprefix("/v1"))), about)
        for path, methods in described(served).items()
        for method, about in methods.items()
    ]


def test_a_parameter_that_a_route_does_not_have_is_refused_by_every_route(served: Any) -> None:
    for method, path, about in operations(served):
        told = problem(served.http.request(method, path, params={"filtre": "x"}), 422, "unknown_parameter", "/filtre")
        for parameter in about.get("parameters", []):
            assert parameter["in"] != "query" or parameter["name"] in told["detail"], path


def test_a_parameter_that_is_given_twice_is_refused(served: Any) -> None:
    response = served.http.get("/audit", params=[("limit", "1"), ("limit", "2")])

    problem(response, 422, "unknown_parameter", "/limit")


def test_a_body_without_the_type_json_is_refused_by_every_route_that_reads_json(served: Any) -> None:
    reading = [(method, path) for method, path, about in operations(served) if "requestBody" in about]

    assert len(reading) > 10
    for method, path in reading:
        parameters = {"lease": "x"} if path.startswith("/work/") else {}
        for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/octet-stream"}):
            refused = served.http.request(method, path, content=b'{"name": "a"}', headers=kind, params=parameters)
            problem(refused, 415, "unsupported_media_type")


def test_the_faults_of_a_body_are_named_up_to_a_hundred(served: Any) -> None:
    unknown = {f"x{number}": 1 for number in range(90)}
    body = {"name": "g", "index": unknown, **unknown}

    told = problem(served.http.post("/galleries", json=body), 422, "invalid_request", "/index/x0")

    assert len(told["errors"]) == 100


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", f"/galleries/{LONG}", None),
        ("GET", f"/versions/{LONG}", None),
        ("DELETE", f"/versions/{LONG}?confirm={LONG}", None),
        ("DELETE", f"/edges/{LONG}/{LONG}/{LONG}?confirm={LONG}", None),
        ("DELETE", f"/keys/{LONG}?confirm={LONG}", None),
        ("GET", f"/audit?{LONG}=1", None),
        ("POST", "/galleries", {"name": "a", LONG: 1}),
        ("POST", "/edges:fit", {"new": "v2", "old": "v1", "gallery": "g", "kind": "ridge", "options": {LONG: 1}}),
        ("GET", "{gallery}/items/" + LONG, None),
        ("POST", "{gallery}/query", {"items": [LONG]}),
        ("POST", "{gallery}/query", {"embeddings": [[1, 2, 3]], "filter": {LONG: 1}}),
        ("POST", "{gallery}/query", {"embeddings": [[1, 2, 3]], "filter": {"field": "a", LONG: 1}}),
        ("POST", "{gallery}/items", {"items": [{"id": "a", LONG: 1}]}),
    ],
)
def test_a_long_name_is_shortened_in_the_error(served: Any, method: str, path: str, body: Any) -> None:
    refused = served.http.request(method, path.replace("{gallery}", served.gallery("plain")), json=body)

    assert refused.status_code in {404, 409, 422}
    assert len(refused.content) < 3_000


ODD = "a/~b" * 100
AT = "/" + (ODD[:MAX_SHOWN] + "...").replace("~", "~0").replace("/", "~1")


@pytest.mark.parametrize(
    ("path", "sent", "pointer"),
    [
        ("{gallery}/query", {"json": {"embeddings": [[1, 2, 3]], ODD: 1}}, AT),
        ("{gallery}/query", {"data": {ODD: "1"}, "files": {"images": b""}}, AT),
        ("{gallery}/evaluations", {"json": {"entries": [{}, {ODD: 1}]}}, f"/entries/1{AT}"),
        ("/edges:check", {"json": {}, "params": {ODD: 1}}, AT),
        ("/edges:fit", {"json": {"new": "v2", "old": "v1", "kind": "ridge", "options": {ODD: 1}}}, f"/options{AT}"),
    ],
)
def test_the_pointer_to_an_unknown_name_is_escaped_and_short(
    served: Any, path: str, sent: dict[str, Any], pointer: str
) -> None:
    refused = served.http.post(path.replace("{gallery}", served.gallery("plain")), **sent)

    told = problem(refused, 422, refused.json()["code"], pointer)
    assert len(str(told)) < 3_000


def test_an_id_of_legal_length_is_shown_whole(served: Any) -> None:
    told = served.http.get(f"{served.gallery('plain')}/items/{'i' * MAX_ID}").json()

    assert repr("i" * MAX_ID) in told["detail"]


def test_a_failure_nobody_expected_tells_nothing_but_its_number(
    served: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError("secret")

    served.gallery(None)
    monkeypatch.setattr("service.http.galleries.galleries.describe", fail)  # of the route alone: no thread asks for it
    with caplog.at_level(logging.ERROR):
        response = served.http.get("/galleries")

    told = problem(response, 500, "internal_error")
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert told["request_id"] in caplog.text
    assert "secret" in caplog.text


def no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError


BAD_ALLOC = RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc")


@pytest.mark.parametrize(
    ("place", "code", "stored"),
    [
        ("service.http.bodies.strict_json._quickly", "out_of_memory", 0),
        ("service.registry.storing.store_items", "out_of_memory", 0),
        ("sqlalchemy.engine.default.DefaultDialect.do_commit", "out_of_memory_unknown", 0),
        ("service.replica.replica.Replica.apply_added", "out_of_memory_committed", 1),
    ],
)
def test_where_memory_ends_it_is_said_whether_the_change_was_made(
    served: Any, monkeypatch: pytest.MonkeyPatch, place: str, code: str, stored: int
) -> None:
    path = served.gallery("plain")
    items = {"items": [{"id": "a", "embedding": [1, 2, 3]}]}
    with monkeypatch.context() as short:
        short.setattr(place, no_memory)
        problem(served.http.post(f"{path}/items", json=items), 503, code)

    assert len(served.http.get(f"{path}/items").json()["items"]) == stored
    assert served.http.post(f"{path}/items", json=items).json()["stored"] == 1


@pytest.mark.parametrize("error", [MemoryError(), BAD_ALLOC], ids=["memory error", "bad_alloc"])
@pytest.mark.parametrize(
    "place", ["onnxruntime.InferenceSession.run", "PIL.Image.open", "PIL.ImageFile.ImageFile.load"]
)
def test_memory_that_ends_in_a_library_is_told_from_what_is_wrong_with_the_input(
    served: Any, monkeypatch: pytest.MonkeyPatch, pictures: list[bytes], place: str, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    path = served.gallery()
    served.ingest(path, {"a": pictures[0]})
    monkeypatch.setattr(place, fail)

    problem(served.query(path, pictures[0], k=1), 503, "out_of_memory")


def test_each_request_has_its_own_number(served: Any) -> None:
    numbers = {served.http.get("/health").headers["x-request-id"] for _ in range(3)}

    assert len(numbers) == 3


def every_error(kind: type[RegraftError] = RegraftError) -> Iterator[type[RegraftError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from every_error(below)


def test_every_error_has_a_sentence_a_status_and_a_code_of_its_own(served: Any) -> None:
    kinds = [kind for kind in every_error() if kind.__module__.partition(".")[0] in {"index", "service"}]
    codes = [kind.code for kind in kinds if kind.__name__ != "ExposedWithoutKey"]

    assert len(codes) > 15
    assert len(codes) == len(set(codes))
    for kind in kinds:
        assert 400 <= kind.status < 600
        assert (kind.__doc__ or "").splitlines()[0].endswith(".")


def test_the_api_describes_itself(served: Any) -> None:
    ingest = described(served)["/v1/galleries/{name}/items"]["post"]
    assert set(ingest["requestBody"]["content"]) == {"multipart/form-data", "application/json", ARROW}
    assert "/v1/galleries/{name}/query" in described(served)
