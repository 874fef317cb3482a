"""Connections to a PostgreSQL with pgvector: kept, given up after a time limit, and made anew where the server went.

psycopg is imported with this module, which is read where a gallery lies in pgvector: it is an extra.
"""

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
from psycopg.pq import Format
from psycopg.types import TypeInfo

from index.engines.circuit_breaker import CircuitBreaker
from index.engines.remote import EngineUnavailable

MOST_IDLE = 32
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
CONNECT_SECONDS = 2
EXTENSION = "create extension if not exists vector"
MISSING_TABLE = (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)
"""What is there is made by the first write."""


class PgVector(bytes):
    """A vector in pgvector's binary form."""

    __slots__ = ()


class Timed(psycopg.Connection[Any]):
    """A connection that waits for no answer longer than until `deadline`, whatever the server or the network does."""

    deadline = float("inf")
    settings: Mapping[str, str] = NO_SETTINGS
    """What was set in its session."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """As psycopg's."""
        left = self.deadline - time.monotonic()
        try:
            return super().wait(gen, min(interval, max(left, 0.001)), left if timeout is None else min(timeout, left))
        except psycopg.errors._WaitTimeout as error:  # noqa: SLF001 - psycopg raises it and names no other
            self.pgconn.finish()
            raise psycopg.OperationalError("no answer in time") from error


def libpq_url(url: str) -> str:
    """A URL of SQLAlchemy's or libpq's as libpq reads it, which knows no driver."""
    return url.replace("postgresql+psycopg://", "postgresql://", 1)


class PgConnections:
    """Those to one server, for calls of at most so many seconds. Thread-safe."""

    def __init__(self, url: str, seconds: float) -> None:
        self._seconds, self._url = seconds, libpq_url(url)
        self._idle: deque[Timed] = deque(maxlen=MOST_IDLE)
        self._breaker = CircuitBreaker()

    @contextmanager
    def take(self, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[Timed]:
        """A connection in autocommit mode for one call, with these settings of the session.

        Raises:
            EngineUnavailable: the server is away, slow or refuses; at once where it just did.
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
                    self.close()  # what else is idle met the same end
                raise EngineUnavailable(f"pgvector: {str(error).strip() or type(error).__name__}") from error

    def close(self) -> None:
        """Close those that are idle."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _open(self) -> Timed:
        deadline = time.monotonic() + self._seconds
        with suppress(IndexError):
            while True:
                idle = self._idle.pop()
                if _is_quiet(idle):
                    idle.deadline = deadline
                    return idle
                idle.close()
        limit = f"-c statement_timeout={int(1000 * self._seconds)}"
        made = Timed.connect(
            self._url, autocommit=True, prepare_threshold=None, connect_timeout=CONNECT_SECONDS, options=limit
        )
        made.deadline = deadline
        try:
            kind = TypeInfo.fetch(made, "vector")
            if kind is None:
                _extend(made)
                kind = TypeInfo.fetch(made, "vector")
        except (psycopg.Error, EngineUnavailable):
            made.close()
            raise
        if kind is None:
            raise EngineUnavailable("this PostgreSQL has pgvector in a schema that is not in its search_path")
        kind.register(made)
        made.adapters.register_dumper(PgVector, _dumper(kind.oid))
        return made


def _extend(connection: Timed) -> None:
    try:
        connection.execute(EXTENSION)
    except psycopg.Error as error:
        raise EngineUnavailable(f"this PostgreSQL has no pgvector: {str(error).strip()}") from error


def _is_quiet(connection: Timed) -> bool:
    """Whether the server has said nothing on a connection that lay idle: what it would say is that it has ended it."""
    if connection.closed:
        return False
    poll = select.poll()
    poll.register(connection.pgconn.socket, select.POLLIN)
    return not poll.poll(0)


def _set(connection: Timed, settings: Mapping[str, str]) -> None:
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
