"""API keys by name: what each scope opens, from when, and until when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from index.version import Version
from service.settings import Settings
from staging.api.operations import WITH_KEY
from staging.api.served import Served, problem, serving
from staging.api.streams import events
from staging.waiting import until

KEY = "correct horse battery"
ROOT = {"authorization": f"Bearer {KEY}"}
ITEMS = "/v1/galleries/{name}/items"
INGEST = {
    ("POST", ITEMS),
    ("PATCH", ITEMS),
    ("DELETE", f"{ITEMS}/{{item_id}}"),
    ("POST", f"{ITEMS}:delete"),
    ("PUT", f"{ITEMS}:embeddings"),
}
READ_BY_ADMINS = {"/v1/audit", "/v1/keys", "/v1/work/{chunk}", "/v1/work/edges/{number}", "/v1/work/versions/{name}"}
SCOPES = ["query", "ingest", "admin"]


def least(method: str, path: str) -> str:
    """The scope that the documentation says."""
    if (method, path) in INGEST:
        return "ingest"
    read = method == "GET" and path not in READ_BY_ADMINS
    return "query" if read or path in {"/v1/galleries/{name}/query", f"{ITEMS}:list"} else "admin"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(Settings(data=tmp_path_factory.mktemp("locked"), api_key=KEY), **ROOT) as running:
        yield running


@pytest.fixture(scope="module")
def keys(locked: Served) -> dict[str, dict[str, str]]:
    """The header for each scope."""
    return {scope: bearer(made(locked, f"has-{scope}", scope)) for scope in SCOPES}


def made(locked: Served, name: str, scope: str) -> str:
    answer = locked.http.post("/keys", json={"name": name, "scope": scope})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["key"])


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path"), WITH_KEY, ids=[f"{m} {p}" for m, p in WITH_KEY])
def test_a_key_opens_what_its_scope_says(
    locked: Served, keys: dict[str, dict[str, str]], method: str, path: str
) -> None:
    address = f"/..{path.replace('{number}', '9').replace('{', '').replace('}', '')}"
    for scope, header in keys.items():
        with locked.http.stream(method, address, headers=header) as answer:
            opened = SCOPES.index(scope) >= SCOPES.index(least(method, path))
            assert (answer.status_code != 403) == opened, (scope, answer.status_code)
            if not opened:
                answer.read()
                assert answer.json()["code"] == "forbidden"
                assert f"has-{scope}" in answer.json()["detail"]


def test_the_openapi_document_names_the_scopes(locked: Served) -> None:
    described = locked.http.get("/../openapi.json").json()["paths"]

    for method, path in WITH_KEY:
        assert described[path][method.lower()]["security"] == [{"bearer": [least(method, path)]}]


def test_what_goes_past_the_framework_asks_as_well(
    locked: Served, keys: dict[str, dict[str, str]], versions: dict[str, Version]
) -> None:
    assert locked.register(versions["v1"]).is_success
    path, body = locked.gallery("v1"), {"embeddings": [[1, 0, 0, 0]], "version": "v1"}

    assert locked.http.post(f"{path}/query", json=body, headers=keys["query"]).status_code == 200
    for header in ({"authorization": ""}, bearer("rg_unknown"), {"authorization": keys["query"]["authorization"][:-1]}):
        problem(locked.http.post(f"{path}/query", json=body, headers=header), 401, "unauthorized")
    item = {"items": [{"id": "a", "embedding": [1, 0, 0, 0]}]}
    problem(locked.http.post(f"{path}/items", json=item, headers=keys["query"]), 403, "forbidden")
    assert locked.http.get(f"{path}/items", headers=keys["query"]).json()["items"] == []
    assert locked.http.post(f"{path}/items", json=item, headers=keys["ingest"]).json()["stored"] == 1


def test_a_key_is_listed_named_in_the_audit_and_deleted(locked: Served) -> None:
    operator = bearer(made(locked, "operator", "admin"))

    created = locked.http.post("/keys", json={"name": "short-lived", "scope": "ingest"}, headers=operator).json()
    listed = {one["name"]: one for one in locked.http.get("/keys").json()["keys"]}
    assert listed["short-lived"] == {name: created[name] for name in ("name", "scope", "created", "galleries")}
    problem(locked.http.post("/keys", json={"name": "short-lived", "scope": "query"}), 409, "key_exists")
    problem(locked.http.delete("/keys/short-lived", headers=operator), 422, "invalid_request")
    assert locked.remove("/keys/short-lived", dry_run=True).status_code == 204
    assert locked.http.get("/galleries", headers=bearer(created["key"])).status_code == 200

    assert locked.http.delete("/keys/short-lived?confirm=short-lived", headers=operator).status_code == 204
    problem(locked.http.get("/galleries", headers=bearer(created["key"])), 401, "unauthorized")
    problem(locked.remove("/keys/short-lived"), 404, "unknown_key")

    rows = locked.http.get("/audit").json()["audit"][:2]
    assert [(row["who"], row["action"], row["subject"]) for row in rows] == [
        ("operator", "key_deleted", "short-lived"),
        ("operator", "key_created", "short-lived"),
    ]
    data = locked.runtime.settings.data
    assert not [file for file in data.rglob("*") if file.is_file() and created["key"].encode() in file.read_bytes()]


@pytest.mark.parametrize("name", ["", "a b", "../x", "api_key", "canary", "local", "worker", 65 * "a"])
def test_a_name_that_cannot_be_is_refused(locked: Served, name: str) -> None:
    answer = locked.http.post("/keys", json={"name": name, "scope": "query"})

    assert problem(answer, 422, "invalid_argument")["errors"][0]["pointer"] == "/name"


def test_a_scope_that_is_none_is_refused(locked: Served) -> None:
    assert "'query', 'ingest' or 'admin'" in locked.http.post("/keys", json={"name": "a", "scope": "all"}).text


def test_a_gallery_that_is_named_twice_is_kept_once(locked: Served) -> None:
    assert locked.http.post("/galleries", json={"name": "twice"}).status_code == 201

    key = locked.http.post("/keys", json={"name": "twice", "scope": "query", "galleries": ["twice", "twice"]}).json()

    assert key["galleries"] == ["twice"]


def test_where_nobody_is_asked_for_a_key_none_is_made(served: Any) -> None:
    problem(served.http.post("/keys", json={"name": "a", "scope": "query"}), 409, "no_api_key")

    assert served.http.get("/keys").json() == {"keys": []}


def test_a_stream_ends_when_its_key_is_deleted(
    locked: Served, versions: dict[str, Version], pictures: list[bytes]
) -> None:
    for version in (versions["v1"], versions["v2"]):
        assert locked.register(version).is_success
    path = locked.filled(pictures, "v1", "v2")
    number = locked.http.post(f"{path}/backfills", json={}).json()["id"]
    watcher = bearer(made(locked, "watcher", "query"))

    with locked.http.stream("GET", f"/backfills/{number}/events", headers=watcher, timeout=20) as response:
        told = events(response.iter_text())
        assert next(told)[0] == "progress"
        assert locked.http.delete("/keys/watcher?confirm=watcher").status_code == 204
        assert list(told) == []
    problem(locked.http.get(f"/backfills/{number}", headers=watcher), 401, "unauthorized")


def test_other_processes_know_a_new_key_at_once_and_a_deleted_one_for_a_moment(locked: Served) -> None:
    with serving(locked.runtime.settings, **ROOT) as other:
        for name in ("everywhere", "elsewhere"):
            problem(other.http.get("/galleries", headers=bearer("rg_unknown")), 401, "unauthorized")  # reads the keys
            header = bearer(made(locked, name, "query"))
            assert other.http.get("/galleries", headers=header).status_code == 200
            assert locked.remove(f"/keys/{name}").status_code == 204
            until(lambda: other.http.get("/galleries", headers=header).status_code == 401)  # noqa: B023 - in this turn


def test_a_start_knows_the_keys_there_are(locked: Served) -> None:
    key = made(locked, "before", "query")

    with serving(locked.runtime.settings, **ROOT) as started:
        assert started.runtime.keys.find(key.encode()) is not None


def test_while_the_database_is_away_known_keys_open_and_unknown_ones_are_not_judged(
    locked: Served, keys: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> Any:
        raise OperationalError("select", {}, OSError("away"))

    assert locked.http.get("/../docs", headers=keys["query"]).status_code == 200  # known from now on
    monkeypatch.setattr(locked.runtime.database, "lookup", away)

    assert locked.http.get("/../docs", headers=keys["query"]).status_code == 200
    problem(locked.http.get("/../docs", headers=bearer("rg_new")), 503, "database_unavailable")


def test_who_guesses_keys_while_the_database_hangs_takes_no_thread_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = threading.Event()
    with serving(Settings(data=tmp_path / "data", api_key=KEY, threads=1), **ROOT) as small:
        answers = small.runtime.database.lookup

        def hanging() -> Any:
            assert again.wait(30)
            return answers()

        with monkeypatch.context() as patched, ThreadPoolExecutor(1) as elsewhere:
            patched.setattr(small.runtime.database, "lookup", hanging)
            guess = elsewhere.submit(small.http.get, "/galleries", headers=bearer("rg_guess"))
            for _ in range(20):  # each takes a thread for its body; by some of them the guess has come
                problem(small.http.post("/keys", json={}, timeout=5), 422, "invalid_request")
                assert not guess.done()
            again.set()

        problem(guess.result(), 401, "unauthorized")


def test_a_start_that_does_not_check_the_keys_there_are_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Settings(data=tmp_path, api_key=KEY), **ROOT) as running:
        made(running, "shop", "query")
    with serving(Settings(data=tmp_path, api_key=KEY), **ROOT):
        assert "keys_not_checked" not in caplog.text
    with serving(Settings(data=tmp_path)):
        assert "action=keys_not_checked keys=1" in caplog.text
