from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from service.http import app
from service.http.openapi import codes_by_status
from service.http.server.draining import Server
from service.http.server.problems import TITLES
from service.runtime import running
from service.settings import Settings
from service.upgrades.deployments.reaper import Reaper
from staging.api.served import problem, serving
from staging.shortcuts import COMPILE_ROUTES
from staging.waiting import until


def test_it_says_when_it_cannot_follow_its_database(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.http.get("/health/ready").json()["status"] == "ready"

    def fail() -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(served.runtime.replica, "_poll", fail)
    until(lambda: served.http.get("/health/ready").status_code != 200)
    problem(served.http.get("/health/ready"), 503, "not_ready")
    assert served.http.get("/health").status_code == 200

    monkeypatch.undo()
    until(lambda: served.http.get("/health/ready").status_code == 200)


def test_the_service_loads_faiss_with_one_thread() -> None:
    code = "import service.http.app, faiss; print(faiss.omp_get_max_threads())"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert told.stdout.strip() == "1"


def test_a_start_that_fails_leaves_no_thread_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no more threads")

    monkeypatch.setattr(Reaper, "start", fail)  # the last one
    before = set(threading.enumerate())

    with pytest.raises(RuntimeError, match="no more threads"), running(Settings(data=tmp_path)):
        pass

    assert set(threading.enumerate()) <= before


def test_no_request_waits_for_a_router_to_be_worked_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> None:
        raise AssertionError("while requests are answered")

    monkeypatch.setattr(app, "_compile_routes", COMPILE_ROUTES)  # as a start does it
    with serving(Settings(data=tmp_path)) as served:
        monkeypatch.setattr("fastapi.routing.get_dependant", late)
        assert served.http.get("/galleries").status_code == 200
        problem(served.http.post("/galleries/none/deployments", json={"version": "v1"}), 404, "unknown_gallery")


def test_a_server_opens_all_the_files_that_it_may() -> None:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, most))
    try:
        app._open_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_a_connection_may_rest_longer_than_clients_and_proxies_keep_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one become a WebSocket, which would be free of all limits."""
    configs = []

    def run(server: Server, _: object) -> None:
        server.config.load()
        configs.append(server.config)
        server.started = True

    monkeypatch.setattr(Server, "run", run)
    monkeypatch.setattr("service.http.app.signal.signal", lambda *_: None)
    monkeypatch.setattr(app, "_share_interpreter", lambda: None)
    app.serve(Settings(data=tmp_path))

    assert configs[0].timeout_keep_alive > 60
    assert configs[0].ws_protocol_class is None


def test_an_unknown_route_and_a_wrong_method_are_named_with_what_is_legal(served: Any) -> None:
    unknown = problem(served.http.get("/galerie"), 404, "not_found")
    wrong = problem(served.http.put("/galleries"), 405, "method_not_allowed")

    assert unknown["detail"] == "there is no route '/v1/galerie'; GET /openapi.json lists them"
    assert wrong["detail"] == "PUT is not legal for '/v1/galleries'; legal: GET, POST"


def test_titles_are_the_names_of_rfc_9110_on_every_python(served: Any) -> None:
    """Python 3.11 knows 422 as Unprocessable Entity."""
    refused = problem(served.http.post("/galleries", json={"name": 5}), 422, "invalid_request")

    assert refused["title"] == "Unprocessable Content"
    assert problem(served.http.get("/galerie"), 404, "not_found")["title"] == "Not Found"
    assert codes_by_status().keys() <= TITLES.keys()


def test_an_end_that_the_user_forces_is_no_failure(tmp_path: Path) -> None:
    """A second Ctrl-C ends uvicorn without the shutdown of the application, whose task is then cancelled."""
    sent: list[str] = []

    async def force() -> None:
        messages: asyncio.Queue[Any] = asyncio.Queue()
        started = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message["type"])
            started.set()

        messages.put_nowait({"type": "lifespan.startup"})
        application = app.create_app(Settings(data=tmp_path))
        task = asyncio.create_task(application({"type": "lifespan", "state": {}}, messages.get, send))
        await started.wait()
        task.cancel()
        await task

    asyncio.run(force())

    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
