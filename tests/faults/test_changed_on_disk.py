"""Folders that change on disk after they were accepted, also while processes run: what is loaded later is refused."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from index.version_folder.archive import pack_version
from service.http.app import create_app
from service.settings import Settings
from service.store.tables import backfill_failure
from staging.inputs.builders import make_version, zip_version
from staging.states.working import SteppedWorker

V1, V2 = 1, 2


@pytest.fixture
def worker(site: Any) -> Iterator[SteppedWorker]:
    made = SteppedWorker(site.settings)
    yield made
    made.close()


def changed(path: Path) -> Callable[[], object]:
    """Change a file; returns what puts it back."""
    kept = path.read_bytes()
    path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    return lambda: path.write_bytes(kept)


class TestWorkerThatLoadsItLater:
    @pytest.mark.parametrize(
        ("file", "when"),
        [
            ("encoder.onnx", "before it starts"),
            ("encoder.onnx", "before the encoder"),
            ("encoder.onnx", "after it rested"),
            ("probe.npz", "before the encoder"),
        ],
    )
    def test_it_moves_nothing_gives_nothing_up_and_goes_on_when_the_folder_is_back(
        self, site: Any, worker: SteppedWorker, when: str, file: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        number = site.start_backfill("g")
        moved = 0
        if when == "before the encoder":
            worker._registry.sync()
        if when == "after it rested":
            worker.step()
            moved = 6
            for registered in worker._registry.all():
                registered.drop_idle(needed=False, idle_seconds=0.0)
        put_back = changed(site.settings.versions / "v2" / file)

        assert not worker.step()

        assert f"{file} changed on disk" in caplog.text or f"{file} does not have the sha256" in caplog.text
        assert site.mix("g").get(V2, 0) == moved
        with site.database.lookup() as connection:
            assert connection.execute(select(func.count()).select_from(backfill_failure)).scalar() == 0
        put_back()
        # The same worker goes on: it has waited.
        for _ in range(2000):
            if not worker.step() and site.backfill(number).state == "done":
                break
        assert site.mix("g") == {V2: 48}
        assert site.backfill(number).failed == 0


class TestServer:
    def test_one_that_runs_refuses_an_encoder_it_loads_later_and_keeps_one_it_has(self, site: Any) -> None:
        """v1's encoder is not loaded before the rollback: v2 reaches v1's items without it."""
        with TestClient(create_app(site.settings), base_url="http://127.0.0.1/v1") as http:
            picture = http.get("/galleries/g/items/i0/image").content

            def ask() -> Any:
                return http.post("/galleries/g/query", data={"k": "1"}, files=[("images", ("q.png", picture))])

            assert ask().status_code == 200
            put_back = [changed(site.settings.versions / v / "encoder.onnx") for v in ("v1", "v2")]

            assert ask().status_code == 200
            assert http.post("/galleries/g/rollback").status_code == 201
            refused = ask()
            assert (refused.status_code, refused.json()["code"]) == (503, "version_broken")
            assert "encoder.onnx changed on disk" in refused.json()["detail"]
            (problem,) = http.get("/health/ready").json()["problems"]
            assert "version v1 is quarantined: encoder.onnx changed on disk" in problem
            for back in put_back:
                back()
            archive = io.BytesIO()
            pack_version(site.settings.versions / "v1", archive)
            assert http.post("/versions", files={"archive": archive.getvalue()}).json()["problem"] is None
            assert ask().status_code == 200

    def test_a_replica_that_starts_later_sets_it_aside_and_names_version_and_file(self, site: Any) -> None:
        with TestClient(create_app(site.settings), base_url="http://127.0.0.1/v1") as first:
            changed(site.settings.versions / "v2" / "encoder.onnx")

            with TestClient(create_app(site.settings), base_url="http://127.0.0.1/v1") as second:
                (problem,) = second.get("/health/ready").json()["problems"]
                assert "version v2 is quarantined: encoder.onnx does not have the sha256" in problem
                assert second.get("/galleries/g").json()["items"] == 48

            assert first.get("/health/ready").json()["status"] == "ready"
            assert first.get("/galleries/g").json()["items"] == 48

    def test_it_is_not_deployed_again(self, site: Any) -> None:
        with TestClient(create_app(site.settings), base_url="http://127.0.0.1/v1") as http:
            changed(site.settings.versions / "v1" / "encoder.onnx")

            refused = http.post("/galleries/g/deployments", json={"version": "v1"})

            assert (refused.status_code, refused.json()["code"]) == (503, "version_broken")
            assert (
                http.get("/versions/v1").json()["problem"]
                == "encoder.onnx does not have the sha256 that card.json lists"
            )
            assert http.get("/galleries/g").json()["current"] == "v2"

    def test_the_same_code_whether_or_not_a_restart_came_between(self, site: Any) -> None:
        answers = []
        for damage_first in (False, True):
            put_back = changed(site.settings.versions / "v1" / "encoder.onnx") if damage_first else None
            with TestClient(create_app(site.settings), base_url="http://127.0.0.1/v1") as http:
                put_back = put_back or changed(site.settings.versions / "v1" / "encoder.onnx")
                for path, body in (("deployments", {"version": "v1"}), ("gates", {"version": "v1"})):
                    refused = http.post(f"/galleries/g/{path}", json=body)
                    answers.append((refused.status_code, refused.json()["code"]))
            put_back()

        assert answers == [(503, "version_broken")] * 4


class TestEdge:
    """An item edge that was added later, whose folder is the service's own."""

    @pytest.fixture
    def added(self, tmp_path: Path) -> tuple[Settings, Path]:
        """Twelve items of v1, a transform backfill to v2 planned, and where the edge's model lies."""
        v1 = make_version(tmp_path / "v1", "v1", 4)
        v2 = make_version(tmp_path / "v2", "v2", 6)
        drawn = make_version(tmp_path / "drawn" / "v2", "v2", 6, edges=[(v1, "forward")])
        settings = Settings(data=tmp_path / "data", lease_seconds=0.05)
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for path in (drawn.folder / "edges" / "v1").iterdir():
                archive.write(path, path.name)
        with TestClient(create_app(settings), base_url="http://127.0.0.1/v1") as http:
            for version in (v1, v2):
                http.post("/versions", files={"archive": zip_version(version.folder)})
            sent = {"archive": ("e.zip", stream.getvalue())}
            assert http.post("/edges", data={"new": "v2", "old": "v1"}, files=sent).status_code == 201
            http.post("/galleries", json={"name": "g"})
            http.post("/galleries/g/deployments", json={"version": "v1"})
            vectors = [[float(n), 1.0, -float(n), 2.0] for n in range(12)]
            items = [{"id": f"i{n}", "embedding": vector} for n, vector in enumerate(vectors)]
            assert http.post("/galleries/g/items", json={"items": items}).status_code == 200
            assert http.post("/galleries/g/deployments", json={"version": "v2"}).status_code == 201
            planned = http.post("/galleries/g/backfills", json={"kind": "transform", "chunk_size": 4})
            assert planned.status_code == 202, planned.text
        (model,) = settings.edges.glob("v2/v1/forward/*/edge.onnx")
        return settings, model

    @pytest.mark.parametrize("when", ["before it starts", "while it runs", "gone"])
    def test_a_worker_that_opens_it_later_moves_nothing_until_it_is_back(
        self, added: tuple[Settings, Path], when: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        settings, model = added
        worker = SteppedWorker(settings)
        if when == "while it runs":
            worker._registry.sync()
        put_back = changed(model)
        if when == "gone":
            shutil.move(model, model.with_name("elsewhere"))

        assert not worker.step()

        with TestClient(create_app(settings), base_url="http://127.0.0.1/v1") as http:
            shown = http.get("/galleries/g/backfills").json()["backfills"][0]
            assert (shown["state"], shown["done"], shown["failed"], shown["retrying"]) == ("running", 0, 0, 0)
            (edge,) = http.get("/edges").json()["edges"]
            assert edge["problem"] == "edge.onnx changed after it was accepted"
            # Items behind it are found by the route that is left.
            assert http.get("/galleries/g").json()["mix"] == {"v1": 12}
        put_back()
        # The same worker: it has waited.
        for _ in range(2000):
            if not worker.step():
                with worker._database.lookup() as connection:
                    if connection.exec_driver_sql("select state from backfill").scalar() == "done":
                        break
        with worker._database.lookup() as connection:
            assert connection.exec_driver_sql("select done, failed from backfill").one() == (12, 0)
        worker.close()
