"""What tests of backfills share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.settings import Settings
from service.store import sql_time
from service.store.database import Database
from service.store.migration import upgrade
from staging.plans import Clock, Planning


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Planning]:
    settings = Settings(data=tmp_path)
    upgrade(settings)
    database = Database(settings.database_url)
    yield Planning(database)
    database.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sql_time, "time", clock)
    return clock
