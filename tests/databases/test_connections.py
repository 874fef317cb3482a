"""How many connections of a PostgreSQL a process takes, and what is answered when all of them are in use, or ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from socket import (
    AF_UNIX,
    IPPROTO_TCP,
    SHUT_WR,
    TCP_KEEPCNT,
    TCP_KEEPIDLE,
    TCP_KEEPINTVL,
    TCP_USER_TIMEOUT,
    socket,
)
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest
from sqlalchemy import Connection, event, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

import service.http.galleries.galleries
import service.store.database.connections
from service.settings import Settings
from service.store.database.connections import Database
from service.store.galleries.gallery import insert_gallery, take_seq
from staging.api.served import serving

pytestmark = pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.store.database.connections, "POOL_SECONDS", 0.05)


def descriptor_of(connection: Connection) -> int:
    return int(connection.connection.driver_connection.fileno())


@contextmanager
def over_tcp(path: str) -> Iterator[int]:
    """The port of a server that hands on to a Unix socket."""

    class Forward(BaseRequestHandler):
        def handle(self) -> None:
            with socket(AF_UNIX) as behind:
                behind.connect(path)
                there = Thread(target=self.copy, args=(self.request, behind))
                there.start()
                self.copy(behind, self.request)
                there.join()

        def copy(self, source: socket, target: socket) -> None:
            while part := source.recv(1 << 16):
                target.sendall(part)
            target.shutdown(SHUT_WR)

    with ThreadingTCPServer(("127.0.0.1", 0), Forward) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def test_a_process_takes_as_many_as_it_is_given(settings: Settings) -> None:
    with closing(Database(settings.database_url, 16)) as database, ExitStack() as held:
        taken: list[Any] = []
        for door, most in ((database.write, 8), (database.read, 4), (database.lookup, 4)):
            taken += [held.enter_context(door()) for _ in range(most)]
            with pytest.raises(PoolTimeout), door():
                pass
        mine = "select count(*) from pg_stat_activity where datname = current_database()"
        assert taken[0].execute(text(mine)).scalar_one() == 16


def test_a_server_whose_machine_vanishes_is_given_up_within_seconds(settings: Settings) -> None:
    place = make_url(settings.database_url)
    with over_tcp(f"{place.query['host']}/.s.PGSQL.5432") as port:
        tcp = place.set(query={"keepalives_count": "3"}, host="127.0.0.1", port=port).render_as_string(False)
        with closing(Database(tcp)) as database:
            for door in (database.write, database.read, database.lookup):
                with door() as connection, socket(fileno=os.dup(descriptor_of(connection))) as end:
                    idle, every, times, unheard = (
                        end.getsockopt(IPPROTO_TCP, option)
                        for option in (TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT, TCP_USER_TIMEOUT)
                    )
                    assert idle + every * times <= 30
                    assert 0 < unheard <= 30_000
                    assert times == 3  # what the URL says


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
                pid = connection.connection.driver_connection.info.backend_pid
                other.execute(text("select pg_terminate_backend(:pid, 1000)"), {"pid": pid})

        event.listen(database._writer, "commit", end_session, once=True)
        refused = served.http.post("/galleries", json={"name": "g"})
        assert (refused.status_code, refused.json()["code"]) == (503, "database_unavailable")
        assert "unknown" in refused.json()["detail"]


@pytest.mark.parametrize("setting", ["transaction_read_only = on", "idle_in_transaction_session_timeout = 1"])
def test_a_server_that_takes_no_changes_is_told_as_one_that_is_away_and_asked_anew(
    settings: Settings, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings) as served:

        def refuse(connection: Connection, *given: Any) -> int:
            connection.execute(text(f"set {setting}"))
            time.sleep(0.05)
            return insert_gallery(connection, *given)

        with monkeypatch.context() as patch:
            patch.setattr(service.http.galleries.galleries, "insert_gallery", refuse)
            refused = served.http.post("/galleries", json={"name": "g"})
        assert (refused.status_code, refused.json()["code"]) == (503, "database_unavailable")
        assert "nothing was changed" in refused.json()["detail"]
        assert served.http.post("/galleries", json={"name": "g"}).status_code == 201


def test_a_change_whose_process_is_frozen_holds_others_up_for_a_while_only(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.store.database.connections, "IDLE_SECONDS", 0.3)
    with closing(Database(settings.database_url)) as database:
        with database.write() as connection:
            number = insert_gallery(connection, "g")

        def freeze() -> None:
            with database.write() as frozen:
                take_seq(frozen, number, 1)
                with database.write() as connection:
                    assert take_seq(connection, number, 1) == 1
                take_seq(frozen, number, 1)

        with pytest.raises(OperationalError):
            freeze()
        with database.write() as connection:
            assert take_seq(connection, number, 1) == 2
