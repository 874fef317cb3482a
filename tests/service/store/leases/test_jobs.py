"""service.store.leases.jobs: a job is one process's at a time, and goes to another once its lease has run out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection

from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.leases.engines import acquire_engine_lease, engine_leases
from service.store.leases.jobs import acquire_job
from service.store.sql import database_clock
from staging.states.plans import Clock

LEASE = 10.0


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    settings = Settings(data=tmp_path)
    upgrade(settings)
    database = Database(settings.database_url)
    with database.write() as connection:
        yield connection
    database.close()


def test_a_job_is_one_processs_for_as_long_as_it_goes_on(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(database_clock, "time", clock)

    def taken(by: str, after: float = 0.0, job: str = "a job") -> bool:
        clock.now += after
        return acquire_job(connection, job, by, LEASE)

    assert [taken("one"), taken("two"), taken("two", job="another")] == [True, False, True]
    for _ in range(3):
        assert [taken("one", after=LEASE - 1), taken("two")] == [True, False]
    assert [taken("two", after=LEASE + 1), taken("one", after=1), taken("one", after=LEASE - 2)] == [True, False, False]
    assert taken("one", after=2)


def test_how_long_ago_the_lease_of_a_gallery_in_an_engine_ended_is_told_by_the_databases_clock(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(database_clock, "time", clock)
    acquire_engine_lease(connection, 1, "pgvector", "g", "one", LEASE)

    clock.now += LEASE + 5

    (lease,) = engine_leases(connection)
    assert lease.name == "g"
    assert lease.over_seconds == pytest.approx(5.0)
