from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.requests import Request

from service.http.app import serve
from service.http.server.auth import ExposedWithoutKey, Guard, check_exposure, is_loopback
from service.settings import Settings
from staging.api.served import problem, serving

KEY = "correct horse battery"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server that asks for a key, and a client that has none."""
    settings = Settings(data=tmp_path_factory.mktemp("locked"), api_key=KEY, host="0.0.0.0")
    with serving(settings) as running:
        yield running.http


@pytest.mark.parametrize("sent", [None, "", KEY, f"Basic {KEY}", "Bearer", f"Bearer {KEY[:-1]}", "Bearer é"])
def test_without_the_right_key_nothing_is_answered(locked: httpx.Client, sent: str | None) -> None:
    headers = {} if sent is None else {"authorization": sent.encode()}
    for method, path in [
        ("GET", "/galleries"),
        ("POST", "/galleries"),
        ("GET", "/health/ready"),
        ("GET", "/nowhere"),
        ("GET", "/../openapi.json"),
        ("GET", "/../docs"),
        ("GET", "/../v1/galleries"),
    ]:
        response = locked.request(method, path, headers=headers)
        problem(response, 401, "unauthorized")
        assert response.headers["www-authenticate"] == "Bearer"


def test_with_the_key_everything_is_answered(locked: httpx.Client) -> None:
    headers = {"authorization": f"Bearer {KEY}"}

    assert locked.get("/galleries", headers=headers).json() == {"galleries": []}
    assert locked.get("/galleries", headers={"authorization": f"bearer {KEY}"}).status_code == 200
    elsewhere = {"host": "gallery.example", "x-forwarded-for": "10.0.0.1", "sec-fetch-site": "cross-site"}
    assert locked.get("/galleries", headers={**headers, **elsewhere}).status_code == 200


def test_health_needs_no_key(locked: httpx.Client) -> None:
    assert locked.get("/health").json() == {"status": "ok", "version": "0.2.0"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:80"}, 200),
        ({"host": "[::1]:8080"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "localhost:80@evil.example"}, 403),
        ({"host": "["}, 403),
        ({"host": "localhost:80", "origin": "http://localhost:80"}, 200),
        ({"host": "localhost:80", "origin": "http://LOCALHOST:80"}, 200),
        ({"host": "localhost:80", "origin": "http://localhost:3000"}, 403),
        ({"host": "localhost:80", "origin": "http://127.0.0.1:80"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"x-forwarded-for": "10.0.0.1"}, 403),
        ({"x-forwarded-host": "gallery.example"}, 403),
        ({"x-real-ip": "10.0.0.1"}, 403),
        ({"forwarded": "for=10.0.0.1"}, 403),
        ({"via": "1.1 proxy"}, 403),
    ],
)
def test_without_a_key_only_this_machines_own_pages_are_answered(
    served: Any, headers: dict[str, str], status: int
) -> None:
    response = served.http.get("/galleries", headers=headers)

    assert response.status_code == status
    if status == 403:
        problem(response, 403, "foreign_origin")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_it_refuses_to_listen_beyond_this_machine_without_a_key(host: str, tmp_path: Path) -> None:
    with pytest.raises(ExposedWithoutKey, match="REGRAFT_API_KEY"):
        serve(Settings(data=tmp_path, host=host))

    check_exposure(Settings(data=tmp_path, host=host, api_key=KEY))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    check_exposure(Settings(host=host))


@pytest.mark.parametrize("name", ["api_key", "worker_key"])
@pytest.mark.parametrize(
    "key", ["", "x", "fifteen letters", "sixteen letters ", "sixteen\nletters.", "sechzehn Zeichön"]
)
def test_a_key_that_is_easily_found_or_cannot_be_sent_is_refused(
    name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"REGRAFT_{name.upper()}", key)

    with pytest.raises(ValidationError, match="at least 16 printable") as refused:
        Settings()
    assert not key or repr(key) not in str(refused.value)


def test_the_two_keys_differ(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="worker_key"):
        Settings(data=tmp_path, api_key=KEY, worker_key=KEY)


def test_what_is_answered_is_never_taken_for_another_type(served: Any) -> None:
    for path in ("/galleries", "/nowhere", "/../docs"):
        assert served.http.get(path).headers["x-content-type-options"] == "nosniff"


def test_the_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGRAFT_API_KEY", KEY)

    assert KEY not in repr(Settings())


def test_a_body_beyond_the_limit_is_refused_however_it_is_sent(served: Any) -> None:
    path = served.gallery()
    large = b"x" * ((1 << 20) + 1)
    headers = {"content-type": "application/json"}

    def pieces() -> Iterator[bytes]:
        yield from (large[start : start + 50_000] for start in range(0, len(large), 50_000))

    for url in ("/galleries", f"{path}/items", f"{path}/query", f"{path}/items:delete"):
        for content in (large, pieces()):
            problem(served.http.post(url, content=content, headers=headers), 413, "body_too_large")
    files = [("images", ("a.png", large))]
    problem(served.http.post(f"{path}/query", files=files), 413, "body_too_large")


def test_a_body_that_is_announced_too_large_is_refused_before_it_comes(served: Any) -> None:
    with closing(HTTPConnection("127.0.0.1", served.http.base_url.port, timeout=30)) as connection:
        connection.putrequest("POST", "/v1/galleries")
        connection.putheader("content-length", str((1 << 20) + 1))
        connection.endheaders()

        assert connection.getresponse().status == 413


def test_json_has_smaller_limits_than_images(tmp_path: Path) -> None:
    def text(size: int) -> bytes:
        return b'"' + b"x" * (size - 2) + b'"'

    settings = Settings(data=tmp_path, max_model_bytes=1000, max_json_bytes=2000, max_body_bytes=3000)
    with serving(settings) as running:
        path = running.gallery(None)
        limits = {
            1000: ["/galleries", "/edges", f"{path}/gates", f"{path}/rollback"],
            2000: [f"{path}/items", f"{path}/query", f"{path}/evaluations", f"{path}/items:delete"],
            3000: ["/work/1?lease=x"],
        }
        for most, routes in limits.items():
            for url in routes:
                headers = {"content-type": "application/json"}
                assert running.http.post(url, content=text(most), headers=headers).status_code != 413, url
                for content in (text(most + 1), iter([text(most), b" "])):
                    problem(running.http.post(url, content=content, headers=headers), 413, "body_too_large")
        files = [("images", ("a.png", b"x"))]
        for url, field in (("items", "items"), ("evaluations", "entries"), ("query", "filter")):
            sent = running.http.post(f"{path}/{url}", data={field: "x" * 2001}, files=files)
            problem(sent, 413, "body_too_large")
        header = {"content-type": "application/x-npy"}
        assert running.http.post(f"{path}/query", content=b"x" * 3000, headers=header).status_code != 413
        problem(running.http.post(f"{path}/query", content=b"x" * 3001, headers=header), 413, "body_too_large")


def test_a_body_is_parsed_while_others_are_answered(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parsing, parsed = threading.Event(), threading.Event()

    def slow(raw: bytes) -> Any:
        parsing.set()
        assert parsed.wait(10)
        return json.loads(raw)

    monkeypatch.setattr("service.http.requests.checked_route.parse_json", slow)
    with ThreadPoolExecutor() as pool:
        created = pool.submit(served.http.post, "/galleries", json={"name": "parsed-slowly"})
        try:
            assert parsing.wait(10)
            assert served.http.get("/health").status_code == 200
        finally:
            parsed.set()
        assert created.result().status_code == 201


def test_a_version_archive_may_be_larger_than_other_bodies(served: Any) -> None:
    files = {"archive": ("v.zip", b"x" * (2 << 20))}

    problem(served.http.post("/versions", files=files), 422, "invalid_version_folder")


def test_a_request_cut_off_by_the_end_of_the_service_is_told_so() -> None:
    sent: list[Any] = []
    counted: list[int] = []

    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    async def cut_off() -> None:
        scope = {"type": "http", "method": "GET", "path": "/v1/galleries", "headers": [(b"host", b"localhost")]}
        guard = Guard(never, Settings(), lambda _, status, __: counted.append(status))
        task = asyncio.create_task(guard(scope, receive, send))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    asyncio.run(cut_off())  # raises nothing, of which uvicorn would log a traceback

    assert [sent[0]["status"]] == counted == [503]
    assert json.loads(sent[1]["body"])["code"] == "shutting_down"


def test_a_client_that_leaves_before_its_request_is_whole_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Any] = []
    counted: list[int] = []

    async def read(scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/galleries", "headers": [(b"host", b"localhost")]}
    guard = Guard(read, Settings(), lambda _, status, __: counted.append(status))
    asyncio.run(guard(scope, receive, send))

    assert (counted, sent) == ([0], [])
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
