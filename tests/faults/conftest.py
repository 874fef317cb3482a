"""Real processes that can be killed, over a data folder that is prepared once and copied for each test."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from index.engines.remote.base import EngineUnavailable
from service.http.app import create_app
from service.settings import Settings
from staging.external.milvus import MilvusTestServer
from staging.external.postgres import NoServer, Server
from staging.inputs.builders import add_text, image_bytes, make_image, make_version, tell_variance, zip_version
from staging.processes.site import Site
from staging.random_operations.world import World
from staging.shortcuts import short_starts, verified_here

ITEMS = 48


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that was given minutes may take them."""
    if minutes := config.getoption("--model-minutes"):
        for test in items:
            test.add_marker(pytest.mark.timeout(60 * minutes + 600), append=False)


@pytest.fixture(scope="module", autouse=True)
def _short_starts() -> Iterator[None]:
    with short_starts():
        yield


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions v1 and v2 (truncate to v1); galleries g and h of the same items, encoded by v1, with v2 current.

    Those of s and t are texts.
    """
    root = tmp_path_factory.mktemp("template")
    v1 = make_version(root / "v1", "v1", 4)
    v2 = make_version(root / "v2", "v2", 6, edges=[(v1, "truncate")])
    v1, v2 = (add_text(version, {"east": np.arange(version.card.dim)}) for version in (v1, v2))
    files = [("images", (f"{n}.png", image_bytes(make_image(n % 5, n)))) for n in range(ITEMS)]
    items = [{"id": f"i{n}", "metadata": {"label": n % 5}, "image": f"{n}.png"} for n in range(ITEMS)]
    app = create_app(Settings(data=root / "data"))
    with verified_here(), TestClient(app, base_url="http://127.0.0.1") as http:
        for version in (v1, v2):
            assert http.post("/v1/versions", files={"archive": zip_version(version.folder)}).status_code == 201
        texts = [{"id": f"i{n}", "text": f"east {n}"} for n in range(ITEMS)]
        for name in ("g", "h", "s", "t"):
            assert http.post("/v1/galleries", json={"name": name}).status_code == 201
            http.post(f"/v1/galleries/{name}/deployments", json={"version": "v1"})
            pictured = {"data": {"items": json.dumps(items)}, "files": files}
            sent = {"json": {"items": texts}} if name in "st" else pictured
            stored = http.post(f"/v1/galleries/{name}/items", **sent)
            assert stored.json()["stored"] == ITEMS
            assert http.post(f"/v1/galleries/{name}/deployments", json={"version": "v2"}).status_code == 201
    return root / "data"


@pytest.fixture
def site(template: Path, tmp_path: Path) -> Iterator[Site]:
    """A copy of the template with nothing running."""
    shutil.copytree(template, tmp_path / "data")
    made = Site(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """v1 <- v2 <- v3 by query edges, v1 -> v3 by an item edge with variance, v4 that only its own encoder reaches."""
    root = tmp_path_factory.mktemp("world")
    v1 = make_version(root / "v1", "v1", 4)
    v2 = make_version(root / "v2", "v2", 6, edges=[(v1, "truncate", 0.7)])
    v3 = make_version(root / "v3", "v3", 6, drift=0.1, edges=[(v2, "identity", 0.8), (v1, "forward")])
    v3 = tell_variance(v3, "v1")
    v4 = make_version(root / "v4", "v4", 5, seed=9)
    return World([v1, v2, v3, v4], lambda number: make_image(number % 7, number), image_bytes)


@pytest.fixture(params=["pgvector", "milvus"])
def engine_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any, dict[str, str]]]:
    """The kind, its server, and the setting that tells of it."""
    if request.param == "milvus":
        for package in ("pymilvus", "milvus_lite"):
            pytest.importorskip(package, reason=f"{package} is not installed")
        milvus = MilvusTestServer(tmp_path / "milvus")
        yield "milvus", milvus, {"milvus_uri": milvus.uri}
        milvus.stop()
        return
    try:
        postgres = Server()
    except NoServer as error:
        pytest.skip(str(error))
    from index.engines.pgvector.engine import PgvectorEngine

    url = postgres.create()
    try:
        with closing(PgvectorEngine(url)) as engine:
            engine.check()
    except EngineUnavailable as error:
        pytest.skip(error.message)
    yield "pgvector", postgres, {"pgvector_url": url}
    postgres.close()
