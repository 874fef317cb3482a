"""An unreachable database is one line in the log, whatever needs it. With PostgreSQL: tests/databases."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from index.events import Event
from service.store import outages
from service.store.faults import is_unreachable
from service.store.outages import OutageLog, RecurringFaults, log_failure

logger = logging.getLogger("service.test")


class PostgresError(Exception):
    def __init__(self, sqlstate: str | None, text: str = "away") -> None:
        super().__init__(text)
        self.sqlstate = sqlstate


def of_server(sqlstate: str | None, text: str = "away") -> OperationalError:
    return OperationalError("select 1", None, PostgresError(sqlstate, text))


def of_sqlite(code: int) -> OperationalError:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = code
    return OperationalError("select 1", None, error)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as the last of these numbers; no outage has been logged yet."""
    times = [0.0]
    monkeypatch.setattr("service.store.outages.time.monotonic", lambda: times[-1])
    monkeypatch.setattr(outages, "OUTAGES", OutageLog())
    return times


def fails(error: Exception) -> Callable[[], object]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (of_server(None), True),
        (of_server("08006"), True),
        (of_server("57P01"), True),
        (of_server("25006"), True),
        (DBAPIError("select 1", None, PostgresError("XX000"), connection_invalidated=True), True),
        (PoolTimeout("every connection is taken"), True),
        (of_sqlite(sqlite3.SQLITE_BUSY), True),
        (of_sqlite(sqlite3.SQLITE_FULL), False),
        (of_sqlite(sqlite3.SQLITE_IOERR), False),
        (of_server("53100"), False),
        (of_server("40P01"), False),
        (ProgrammingError("select", None, PostgresError("42601")), False),
        (ConnectionRefusedError(), False),
    ],
)
def test_which_errors_mean_that_the_database_is_away(error: Exception, away: bool) -> None:
    assert is_unreachable(error) == away


def test_an_outage_is_one_line_a_minute_of_all_threads_with_its_cause(
    caplog: pytest.LogCaptureFixture, clock: list[float]
) -> None:
    first, second = RecurringFaults(logger), RecurringFaults(logger)
    for now in range(90):
        clock.append(float(now))
        for errors, name in ((first, "curves_not_followed"), (second, "planning_failed")):
            assert not errors.attempt(Event(name), fails(of_server(None, "connection refused\nis it running?")))
        log_failure(logger, Event("keys_unread"), of_server("57P03", "it starts"))

    lines = [logging.Formatter().format(record) for record in caplog.records]
    assert lines == ["action=database_unavailable reason='connection refused'"] * 2


def test_other_errors_keep_their_event_and_traceback(caplog: pytest.LogCaptureFixture) -> None:
    errors: Any = RecurringFaults(logger)
    errors.attempt(Event("planning_failed"), fails(ValueError("odd")))
    log_failure(logger, Event("keys_unread"), of_server("42601"))

    told = [(str(record.msg), record.exc_info[0]) for record in caplog.records if record.exc_info]
    assert told == [("action=planning_failed", ValueError), ("action=keys_unread", OperationalError)]
