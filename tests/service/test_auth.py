from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from service.http.app import serve
from service.http.auth import ExposedWithoutKey, Guard, check_exposure, is_loopback
from service.settings import Settings

KEY = "correct horse"

Problem = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[httpx.Client]:
    """A server that asks for a key, and a client that has none."""
    settings = Settings(data=tmp_path_factory.mktemp("locked"), api_key=KEY, host="0.0.0.0")
    with serving(settings) as running:
        yield running.http


@pytest.mark.parametrize("sent", [None, "", KEY, f"Basic {KEY}", "Bearer", f"Bearer {KEY[:-1]}", "Bearer é"])
def test_without_the_right_key_nothing_is_answered(locked: httpx.Client, problem: Problem, sent: str | None) -> None:
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
    assert locked.get("/galleries", headers={**headers, "host": "gallery.example"}).status_code == 200


def test_health_needs_no_key(locked: httpx.Client) -> None:
    assert locked.get("/health").json() == {"status": "ok", "version": "0.1.0"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:80"}, 200),
        ({"host": "[::1]:8080"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "localhost:80@evil.example"}, 403),
        ({"host": "["}, 403),
        ({"origin": "http://localhost:3000"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_without_a_key_only_this_machines_own_pages_are_answered(
    served: Any, problem: Problem, headers: dict[str, str], status: int
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


def test_an_empty_key_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGRAFT_API_KEY", "")

    with pytest.raises(ValidationError):
        Settings()


def test_the_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGRAFT_API_KEY", KEY)

    assert KEY not in repr(Settings())


def test_a_body_beyond_the_limit_is_refused_however_it_is_sent(served: Any, problem: Problem) -> None:
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


def test_a_version_archive_may_be_larger_than_other_bodies(served: Any, problem: Problem) -> None:
    files = {"archive": ("v.zip", b"x" * (2 << 20))}

    problem(served.http.post("/versions", files=files), 422, "invalid_version_folder")


def test_a_request_cut_off_by_the_end_of_the_service_is_told_so() -> None:
    sent: list[Any] = []

    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    async def cut_off() -> None:
        scope = {"type": "http", "method": "GET", "path": "/v1/galleries", "headers": [(b"host", b"localhost")]}
        task = asyncio.create_task(Guard(never, Settings())(scope, receive, send))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cut_off())

    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["code"] == "shutting_down"
