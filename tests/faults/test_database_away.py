"""SQLite locked by somebody else for longer than anybody waits: requests are told, workers wait, nothing is lost.

PostgreSQL, crashed and started again: tests/databases/test_processes.py.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi.testclient import TestClient

import service.store.database.connections
from service.backfills.worker import Worker
from service.http.app import create_app
from staging.waiting import until

V2 = 2


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.store.database.connections, "BUSY_SECONDS", 0.05)


@contextmanager
def locked(site: Any) -> Iterator[None]:
    """Another program writes, and does not end."""
    other = sqlite3.connect(site.settings.data / "regraft.db", isolation_level=None)
    other.execute("begin immediate")
    try:
        yield
    finally:
        other.execute("rollback")
        other.close()


def test_a_write_is_refused_as_a_whole_and_reads_and_queries_go_on(site: Any) -> None:
    with TestClient(create_app(site.settings), base_url="http://127.0.0.1/v1") as http:
        picture = http.get("/galleries/g/items/i3/image").content
        before = http.get("/galleries/g").json()
        rows = site.state("g")

        with locked(site):
            files = [("images", ("a.png", picture))]
            stored = http.post("/galleries/g/items", data={"items": '[{"id": "new", "image": "a.png"}]'}, files=files)
            assert (stored.status_code, stored.json()["code"]) == (503, "database_unavailable")
            assert "nothing was changed" in stored.json()["detail"]
            for path, body in (
                ("/galleries/g/rollback", {}),
                ("/galleries/g/backfills", {}),
                ("/galleries/g/items:delete", {"ids": ["i1"]}),
                ("/galleries", {"name": "late"}),
            ):
                refused = http.post(path, json=body)
                assert (refused.status_code, refused.json()["code"]) == (503, "database_unavailable"), path
            found = http.post("/galleries/g/query", data={"k": "1"}, files=files)
            assert found.json()["results"][0]["matches"][0]["id"] == "i3"
            assert http.get("/galleries/g").json() == before

        assert site.state("g") == rows
        assert http.post("/galleries", json={"name": "late"}).status_code == 201


def test_a_worker_waits_and_goes_on(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    number = site.start_backfill("g")
    stop = threading.Event()
    worker = Worker(site.settings, stop)
    working = threading.Thread(target=worker.work, daemon=True)
    try:
        with locked(site):
            working.start()
            until(lambda: caplog.text.count("action=database_busy") > 1)
            assert site.mix("g").get(V2, 0) == 0
        until(lambda: site.backfill(number).state == "done")
    finally:
        stop.set()
        working.join()
        worker.close()

    row = site.backfill(number)
    assert (row.done, row.skipped, row.failed) == (48, 0, 0)
