"""Data that is healthy, and a copy of it for each test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from index.version import Version
from service.settings import Settings
from service.store.database.connections import Database
from staging.api.served import serving
from staging.states.ward import Ward
from staging.states.working import work


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Version], pictures: list[bytes]) -> Path:
    settings = Settings(data=tmp_path_factory.mktemp("healthy"))
    with serving(settings) as running:
        for name in ("v1", "v2"):
            running.register(versions[name])
        path = running.filled(pictures[:6], "v1", "v2")
        running.http.post(f"{path}/backfills", json={"limit": 4, "order": "oldest"})
        work(settings)
    return settings.data


@pytest.fixture
def ward(tmp_path: Path, healthy: Path) -> Iterator[Ward]:
    settings = Settings(data=tmp_path / "data")
    shutil.copytree(healthy, settings.data)
    database = Database(settings.database_url)
    yield Ward(settings, database)
    database.close()
