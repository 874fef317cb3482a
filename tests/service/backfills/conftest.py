"""What tests of backfills share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.sql import database_clock
from staging.states.plans import Clock, Planning


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
    monkeypatch.setattr(database_clock, "time", clock)
    return clock
