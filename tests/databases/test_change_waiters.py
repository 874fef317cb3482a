"""A replica on PostgreSQL looks when it is notified, and by the clock while it cannot be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import event, text

from service.registry.edge_records import delete_edge
from service.registry.registry import Registry
from service.registry.version_records import insert_version
from service.replica.replica import Replica
from service.settings import Settings
from service.store.database import change_waiters
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.galleries.deletion import delete_gallery
from service.store.galleries.gallery import insert_gallery, take_seq
from staging.inputs.builders import make_version
from staging.waiting import until

LISTENERS = "from pg_stat_activity where datname = current_database() and query = 'LISTEN regraft'"

pytestmark = pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    upgrade(settings)
    with closing(Database(settings.database_url)) as made:
        v1 = make_version(settings.versions / "v1", "v1", 2)
        v2 = make_version(settings.versions / "v2", "v2", 3, edges=[(v1, "truncate")])
        with made.write() as connection:
            insert_version(connection, v1, [])
            insert_version(connection, v2, [1])
            insert_gallery(connection, "g")
        yield made


@pytest.fixture
def replica(database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    """One that would look by itself after a minute only."""
    monkeypatch.setattr(change_waiters, "MAX_WAIT_SECONDS", 60.0)
    made = Replica(database, Registry(database, settings), settings.indexes, 0.005)
    made.start()
    try:
        until(lambda: listeners(database) == 1)
        yield made
    finally:
        made.stop()


def listeners(database: Database) -> int:
    with database.lookup() as connection:
        return int(connection.execute(text(f"select count(*) {LISTENERS}")).scalar_one())


def write(database: Database, count: int = 1) -> int:
    with database.write() as connection:
        return take_seq(connection, 1, count) + count - 1


def test_what_is_committed_is_looked_at_and_nothing_else(
    replica: Replica, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, asked = replica.find("g"), list[Any]()
    moment = database.commit_marker
    time.sleep(0.05)
    monkeypatch.setattr(database, "commit_marker", lambda: asked.append(1) or moment())
    time.sleep(0.2)
    assert not asked
    number = write(database)
    until(lambda: loaded.seq == number)
    with database.write() as connection:
        delete_edge(connection, 1)
    until(lambda: loaded.followed_edges == ())
    with database.write() as connection:
        delete_gallery(connection, 1)
    until(lambda: not replica.all())
    assert len(asked) < 20


def test_a_lost_connection_is_made_up_for_by_the_clock_until_there_is_another(
    replica: Replica, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = replica.find("g")

    def cut() -> None:
        with database.lookup() as connection:
            connection.execute(text(f"select pg_terminate_backend(pid) {LISTENERS}"))

    cut()
    number = write(database)
    until(lambda: loaded.seq == number)
    assert listeners(database) == 0  # it is tried again after a minute
    monkeypatch.setattr(change_waiters, "MAX_WAIT_SECONDS", 0.05)
    until(lambda: listeners(database) == 1)
    monkeypatch.setattr(change_waiters, "MAX_WAIT_SECONDS", 60.0)
    number = write(database)
    until(lambda: loaded.seq == number)
    assert replica.failure is None


REFUSAL = "do $$ begin raise exception 'cannot execute LISTEN during recovery' using errcode = '25006'; end $$"


def test_a_server_that_refuses_to_notify_is_polled_and_asked_again(
    replica: Replica, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A primary that became a standby answers queries, but refuses LISTEN until the address leads to the new one."""
    loaded, refused = replica.find("g"), list[str]()

    def refuse(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
        if statement != "LISTEN regraft":
            return statement, parameters
        refused.append(statement)
        return REFUSAL, parameters

    event.listen(database._finder, "before_cursor_execute", refuse, retval=True)
    monkeypatch.setattr(change_waiters, "MAX_WAIT_SECONDS", 0.05)
    with database.lookup() as connection:
        connection.execute(text(f"select pg_terminate_backend(pid) {LISTENERS}"))
    until(lambda: len(refused) > 2)
    number = write(database)
    until(lambda: loaded.seq == number)
    event.remove(database._finder, "before_cursor_execute", refuse)
    until(lambda: listeners(database) == 1)
    number = write(database)
    until(lambda: loaded.seq == number)
    assert replica.failure is None
