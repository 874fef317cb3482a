from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from index.errors import RegraftError
from service.replica.replica import Replica

Problem = Callable[..., dict[str, Any]]


def test_an_unknown_route_is_a_problem(served: Any, problem: Problem) -> None:
    problem(served.http.get("/nowhere"), 404, "not_found")
    problem(served.http.get("/../nowhere"), 404, "not_found")


def test_a_wrong_method_is_a_problem_that_names_the_right_one(served: Any, problem: Problem) -> None:
    response = served.http.put("/galleries")

    problem(response, 405, "method_not_allowed")
    assert response.headers["allow"]


def test_a_wrong_media_type_is_a_problem(served: Any, problem: Problem) -> None:
    path = served.gallery()

    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        for route in ("items", "query"):
            detail = problem(
                served.http.post(f"{path}/{route}", content=b"a=1", headers=headers), 415, "unsupported_media_type"
            )["detail"]
            assert "application/json or multipart/form-data" in detail


@pytest.mark.parametrize(
    ("content", "code", "pointer"),
    [
        (b'{"name": ', "invalid_request", ""),
        (b"\xff", "bad_request", None),
        (b"[" * 100_000, "bad_request", None),
        (b"[]", "invalid_request", ""),
        (b"", "invalid_request", ""),
        (b"{}", "invalid_request", "/name"),
        (b'{"name": NaN}', "invalid_request", "/name"),
        (b'{"name": 7}', "invalid_request", "/name"),
        (b'{"name": "a", "b/~c": 1}', "invalid_request", "/b~1~0c"),
        (b'{"name": "a", "b\\ud800": 1}', "invalid_request", ""),
        (b'{"name": "a\\ud800"}', "invalid_request", ""),
        (b'{"name": ""}', "invalid_argument", "/name"),
        (b'{"name": "a b"}', "invalid_argument", "/name"),
        (b'{"name": "../a"}', "invalid_argument", "/name"),
    ],
)
def test_a_bad_body_is_a_problem_that_names_the_field(
    served: Any, problem: Problem, content: bytes, code: str, pointer: str | None
) -> None:
    response = served.http.post("/galleries", content=content, headers={"content-type": "application/json"})

    assert response.status_code in (400, 422)
    problem(response, response.status_code, code, pointer)


def test_a_bad_parameter_is_a_problem_that_names_it(served: Any, problem: Problem) -> None:
    path = served.gallery()

    for limit in ("0", "1001", "x", ""):
        problem(served.http.get(f"{path}/items", params={"limit": limit}), 422, "invalid_request", "/limit")
    problem(served.http.get(f"{path}/items", params={"cursor": "?"}), 422, "invalid_argument", "/cursor")
    problem(served.http.post(f"{path}/items", params={"atomic": "x"}), 422, "invalid_request", "/atomic")


def test_a_failure_nobody_expected_tells_nothing_but_its_number(
    served: Any, problem: Problem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(replica: Replica) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Replica, "all", fail)
    with caplog.at_level(logging.ERROR):
        response = served.http.get("/galleries")

    told = problem(response, 500, "internal_error")
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert told["request_id"] in caplog.text
    assert "secret" in caplog.text


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
    described = httpx.get(str(served.http.base_url).replace("/v1/", "/openapi.json")).json()

    ingest = described["paths"]["/v1/galleries/{name}/items"]["post"]
    assert set(ingest["requestBody"]["content"]) == {"multipart/form-data", "application/json"}
    assert "/v1/galleries/{name}/query" in described["paths"]
