"""How many connections of a PostgreSQL a process takes, and what is answered when all of them are in use."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import TimeoutError as PoolTimeout

import service.store.database
from service.settings import Settings
from service.store.database import Database
from staging.served import serving

pytestmark = pytest.mark.parametrize("engine", ["postgresql"], indirect=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.store.database, "POOL_SECONDS", 0.05)


def test_a_process_takes_as_many_as_it_is_given(settings: Settings) -> None:
    with closing(Database(settings.database_url, 16)) as database, ExitStack() as held:
        taken: list[Any] = []
        for door, most in ((database.write, 8), (database.read, 4), (database.lookup, 4)):
            taken += [held.enter_context(door()) for _ in range(most)]
            with pytest.raises(PoolTimeout), door():
                pass
        mine = "select count(*) from pg_stat_activity where datname = current_database()"
        assert taken[0].execute(text(mine)).scalar_one() == 16


def test_a_change_without_a_connection_is_refused_and_says_that_nothing_was_changed(settings: Settings) -> None:
    with serving(settings.model_copy(update={"connections": 16})) as served:
        with ExitStack() as held:
            for _ in range(8):
                held.enter_context(served.runtime.database.write())
            refused = served.http.post("/galleries", json={"name": "g"})
        assert (refused.status_code, refused.json()["code"]) == (503, "database_unavailable")
        assert "nothing was changed" in refused.json()["detail"]
        assert served.http.post("/galleries", json={"name": "g"}).status_code == 201


def test_a_change_that_is_cut_off_at_its_commit_says_that_its_fate_is_unknown(settings: Settings) -> None:
    with serving(settings) as served:
        database = served.runtime.database

        def end_session(connection: Connection) -> None:
            with database.lookup() as other:
                pid = connection.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
                other.execute(text("select pg_terminate_backend(:pid, 1000)"), {"pid": pid})

        event.listen(database._writer, "commit", end_session, once=True)
        refused = served.http.post("/galleries", json={"name": "g"})
        assert (refused.status_code, refused.json()["code"]) == (503, "database_unavailable")
        assert "unknown" in refused.json()["detail"]
