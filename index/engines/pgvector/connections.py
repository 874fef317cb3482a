"""`PgConnections`: a pool of connections to a PostgreSQL server with pgvector, with a time limit for calls."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import psycopg
from psycopg.adapt import Buffer, Dumper
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Format
from psycopg.types import TypeInfo

from index.engines.remote.base import EngineUnavailable
from index.engines.remote.circuit_breaker import CircuitBreaker

MAX_IDLE = 32
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
CONNECT_SECONDS = 2
EXTENSION = "create extension if not exists vector"
MISSING_TABLE = (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)
"""Errors of a table that the first write would create."""


class PgVector(bytes):
    """A vector in pgvector's binary form."""

    __slots__ = ()


class TimedConnection(psycopg.Connection[Any]):
    """A connection that waits for answers until `deadline` at most, even if the server or the network hangs."""

    deadline = float("inf")
    settings: Mapping[str, str] = NO_SETTINGS
    """The settings of its session."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Overrides psycopg's method to stop at the deadline."""
        left = self.deadline - time.monotonic()
        try:
            return super().wait(gen, min(interval, max(left, 0.001)), left if timeout is None else min(timeout, left))
        except psycopg.errors._WaitTimeout as error:  # noqa: SLF001 - psycopg raises it and names no other
            self.pgconn.finish()
            raise psycopg.OperationalError("no answer in time") from error


def libpq_url(url: str) -> str:
    """A URL of SQLAlchemy or libpq in libpq's form, without a driver."""
    return url.replace("postgresql+psycopg://", "postgresql://", 1)


class PgConnections:
    """A pool of connections to one server, with a time limit for each call. Thread-safe."""

    def __init__(self, url: str, seconds: float) -> None:
        self._seconds, self._url = seconds, libpq_url(url)
        self._idle: deque[TimedConnection] = deque(maxlen=MAX_IDLE)
        self._breaker = CircuitBreaker()

    @contextmanager
    def take(self, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[TimedConnection]:
        """A connection in autocommit mode for one call, with these settings of the session.

        Raises:
            EngineUnavailable: the server is unreachable, slow or refuses; at once if it has just failed.
        """
        with self._breaker.call():
            try:
                connection = self._open()
                try:
                    _set(connection, settings)
                    yield connection
                finally:
                    if not connection.closed and not connection.broken:
                        connection.deadline = float("inf")
                        self._idle.append(connection)
            except MISSING_TABLE:
                raise
            except psycopg.Error as error:
                if isinstance(error, psycopg.OperationalError):
                    self.close()  # the other idle connections are broken, too
                raise EngineUnavailable(f"pgvector: {' '.join(str(error).split()) or type(error).__name__}") from error

    def close(self) -> None:
        """Close the idle connections."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _open(self) -> TimedConnection:
        deadline = time.monotonic() + self._seconds
        with suppress(IndexError):
            while True:
                idle = self._idle.pop()
                if _is_quiet(idle):
                    idle.deadline = deadline
                    return idle
                idle.close()
        options = f"{_options(self._url)} -c statement_timeout={int(1000 * self._seconds)}"
        made = TimedConnection.connect(
            self._url, autocommit=True, prepare_threshold=None, connect_timeout=CONNECT_SECONDS, options=options
        )
        made.deadline = deadline
        try:
            kind = _vector_type(made)
        except (psycopg.Error, EngineUnavailable):
            made.close()
            raise
        kind.register(made)
        made.adapters.register_dumper(PgVector, _dumper(kind.oid))
        return made


def _options(url: str) -> str:
    """The options of sessions in a URL, such as its search_path. Raises EngineUnavailable if libpq cannot read it."""
    try:
        return str(conninfo_to_dict(url).get("options") or "")
    except psycopg.ProgrammingError:  # its message repeats parts of the URL, which may be the password
        why = "pgvector: its URL cannot be read: unknown parameter, or a character that is not percent-encoded"
        raise EngineUnavailable(why) from None


def _vector_type(connection: TimedConnection) -> TypeInfo:
    """The type of vectors, after creating the extension if it is missing. Raises EngineUnavailable."""
    kind = TypeInfo.fetch(connection, "vector")
    if kind is None:
        _create_extension(connection)
        kind = TypeInfo.fetch(connection, "vector")
    if kind is None:
        raise EngineUnavailable("this PostgreSQL has pgvector in a schema that is not in its search_path")
    return kind


def _create_extension(connection: TimedConnection) -> None:
    try:
        connection.execute(EXTENSION)
    except psycopg.Error as error:
        raise EngineUnavailable(f"this PostgreSQL has no pgvector: {str(error).strip()}") from error


def _is_quiet(connection: TimedConnection) -> bool:
    """Whether an idle connection has no unread data, which would be the server's notice that it closed it."""
    if connection.closed:
        return False
    poll = select.poll()
    poll.register(connection.pgconn.socket, select.POLLIN)
    return not poll.poll(0)


def _set(connection: TimedConnection, settings: Mapping[str, str]) -> None:
    if new := {name: value for name, value in settings.items() if connection.settings.get(name) != value}:
        calls = ", ".join(["set_config(%s, %s, false)"] * len(new))
        connection.execute(f"select {calls}", [part for one in new.items() for part in one])
        connection.settings = {**connection.settings, **new}


def _dumper(number: int) -> type[Dumper]:
    class VectorDumper(Dumper):
        format = Format.BINARY
        oid = number

        def dump(self, obj: PgVector) -> Buffer:
            return obj

    return VectorDumper
