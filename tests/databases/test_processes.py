"""The whole story on PostgreSQL by real processes: a worker killed, the database crashed, a rollback at the end."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from service.settings import Settings
from service.store.database.connections import Database
from service.store.tables import backfill, embedding, item
from staging.inputs.builders import image_bytes, make_image, make_version, zip_version
from staging.processes.site import Site
from staging.waiting import until

ITEMS = 40

pytestmark = pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)


@pytest.fixture
def site(settings: Settings) -> Iterator[Site]:
    settings.data.mkdir(parents=True)
    with closing(Site(settings.data, settings)) as made:
        yield made


def test_a_backfill_survives_a_killed_worker_and_a_crashed_database_and_can_be_rolled_back(
    site: Site, server: Any, tmp_path: Path
) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 6, edges=[(v1, "truncate")])
    pictures = [image_bytes(make_image(n % 5, n)) for n in range(ITEMS)]
    api = site.server()
    http = site.http
    for version in (v1, v2):
        sent = http.post("/versions", files={"archive": zip_version(version.folder)})
        assert sent.status_code == 201, sent.text
    http.post("/galleries", json={"name": "g"})
    http.post("/galleries/g/deployments", json={"version": "v1"})
    items = [{"id": f"i{n}", "metadata": {"n": n}, "image": f"{n}.png"} for n in range(ITEMS)]
    files = [("images", (f"{n}.png", picture)) for n, picture in enumerate(pictures)]
    assert http.post("/galleries/g/items", data={"items": json.dumps(items)}, files=files).json()["stored"] == ITEMS

    def answers() -> list[Any]:
        asked = [("images", ("q.png", picture)) for picture in pictures[:5]]
        found = http.post("/galleries/g/query", data={"k": "10"}, files=asked)
        assert found.status_code == 200, found.text
        return [result["matches"] for result in found.json()["results"]]

    before = answers()
    assert http.post("/galleries/g/deployments", json={"version": "v2"}).status_code == 201
    number = http.post("/galleries/g/backfills", json={"chunk_size": 2, "rate": 4}).json()["id"]

    def job() -> dict[str, Any]:
        return dict(http.get(f"/backfills/{number}").json())

    doomed, worker = site.worker(), site.worker()
    # One that starts while there is no database says so and ends: both are to be at work before it goes.
    until(lambda: all("worker_started" in site.log(process) for process in (doomed, worker)), api, doomed, worker)
    until(lambda: job()["done"] > 2, api, doomed, worker)
    doomed.kill()
    assert doomed.wait() == -signal.SIGKILL
    server.stop(signal.SIGQUIT)
    away = http.get(f"/backfills/{number}")
    assert (away.status_code, away.json()["code"]) == (503, "database_unavailable")
    assert http.get("/health/ready").status_code == 503
    server.start()
    until(site.answers, api)
    assert job()["state"] == "running"
    database = Database(site.settings.database_url)  # no connection of it is older than the crash
    with database.write() as connection:
        connection.execute(update(backfill).values(rate=None))  # slow until the crash, so that it comes in the middle
    until(lambda: job()["state"] == "done", api, worker)

    ended = job()
    assert (ended["total"], ended["done"], ended["skipped"], ended["failed"]) == (ITEMS, ITEMS, 0, 0)
    until(lambda: http.get("/galleries/g").json()["mix"] == {"v2": ITEMS}, api)
    with database.read() as connection:
        held = connection.execute(select(embedding.c.item_id, embedding.c.version_id)).all()
        seqs = list(connection.execute(select(item.c.seq)).scalars())
    database.close()
    assert len(held) == len(set(held)) == 2 * ITEMS
    assert len(set(seqs)) == ITEMS
    assert http.post("/galleries/g/rollback").status_code == 201
    assert answers() == before
