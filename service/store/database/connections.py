"""Connections and transactions of SQLite (in WAL mode) or PostgreSQL, by three methods of `Database`.

`write` is one transaction that changes something, `read` one consistent snapshot over several statements, `lookup`
single statements without a transaction (the query path). Only a request or a worker's step opens them.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.pool import PoolProxiedConnection

from index.retry import attempts, retry_forever
from service.errors import DeletedMeanwhile
from service.settings import CONNECTIONS
from service.store.database.change_waiters import NotifyWaiter, PollingWaiter
from service.store.faults import is_damage, is_lost_reference, needs_reconnect
from service.store.sql.database_clock import prepare_sqlite
from service.store.vectors.reader import VectorReader

IsolationLevel = Literal["READ COMMITTED", "REPEATABLE READ", "AUTOCOMMIT"]

BUSY_SECONDS = 30.0
"""How long a SQLite statement waits for another process's transaction."""
POOL_SIZE = 32
IDLE_CONNECTIONS = 5
"""Idle connections to a server that each of the three pools keeps."""
POOL_SECONDS = 30.0
"""How long to wait for a connection while all connections of a pool are in use."""
SILENCE_LIMITS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,
}
"""libpq's limits until a silent server counts as unreachable; the system's own are minutes or hours. The time of a
statement is not limited."""
IDLE_SECONDS = 60.0
"""How long PostgreSQL keeps an idle writing transaction, for which others wait: its process may be frozen, or its
machine lost, which a server notices only hours later."""
WRITER_CACHE_KIB = 65_536
"""SQLite's page cache of a writing connection: a backfill in random order needs the same pages again and again."""
CHECKPOINT_PAGES = 16_384
"""Pages of 4 KiB in SQLite's log before they are copied into the database; fewer copies mean fewer random writes."""
STREAMED = {"stream_results": True}
"""Options of one statement; on a connection, they would make PostgreSQL use a cursor for all later ones, too."""
TIMELINE = text("select case when not pg_is_in_recovery() then left(pg_walfile_name(pg_current_wal_lsn()), 8) end")
"""The timeline of a PostgreSQL server, null while it is a standby, which begins a new one when it becomes primary."""


class CommitState:
    """Whether changes of a request are `committed`; `committing`: a commit has begun, so its outcome is unknown."""

    committed = False
    committing = False


COMMIT_STATE = ContextVar("COMMIT_STATE", default=CommitState())  # noqa: B039 - the default is for work outside requests, which does not read it


class Database:
    """The connections of one process."""

    def __init__(self, url: str, connections: int = CONNECTIONS) -> None:
        """`connections`: the most that it opens to a PostgreSQL server."""
        sqlite, half, quarter = is_sqlite(url), connections // 2, connections // 4
        self._log = Path(f"{make_url(url).database}-wal")
        self._writer = sqlite_engine(url, "BEGIN IMMEDIATE") if sqlite else _server_engine(url, "READ COMMITTED", half)
        self._reader = sqlite_engine(url, "BEGIN") if sqlite else _server_engine(url, "REPEATABLE READ", quarter)
        self._finder = sqlite_engine(url) if sqlite else _server_engine(url, "AUTOCOMMIT", quarter)
        self.vectors = VectorReader()
        """Reads vectors from files; an execution option of each connection."""
        for engine in (self._writer, self._reader, self._finder):
            engine.update_execution_options(vectors=self.vectors)
        self.partitions: set[tuple[int, int]] = set()
        """Galleries and versions known to have partitions, see `service.store.galleries.partitions`."""
        self.damaged = False
        """Whether a statement has found the file damaged; it can be restored only while no process uses it."""
        for engine in (self._writer, self._reader, self._finder):
            event.listen(engine, "handle_error", self._classify_error, retval=True)
        if not sqlite:
            event.listen(self._writer, "connect", _limit_idle_transactions)
        # Writers wait for SQLite by polling; within the process, a lock wakes them at once.
        self._write_lock: AbstractContextManager[Any] = threading.Lock() if sqlite else nullcontext()
        # SQLite counts the commits of other connections per connection, so one is kept to read the count.
        self.is_sqlite = sqlite
        """Whether it is SQLite, whose `commit_marker` reads shared memory instead of a server."""
        self._tells_timeline = not sqlite
        self._watcher: PoolProxiedConnection | None = None
        self._cursor: Any = None
        self._watcher_lock = threading.Lock()

    @contextmanager
    def write(self, *, dry_run: bool = False) -> Iterator[Connection]:
        """One transaction: committed at the end, rolled back by any exception, and always with `dry_run`.

        Raises:
            DeletedMeanwhile: a row refers to one that another process has deleted.
        """
        commit_state = COMMIT_STATE.get()
        with self._write_lock, self._writer.connect() as connection:
            with connection.begin() as transaction:
                with _lost_references():
                    yield connection
                if dry_run:
                    transaction.rollback()
                commit_state.committing = not dry_run
            commit_state.committed, commit_state.committing = commit_state.committed or commit_state.committing, False

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One snapshot: every statement sees the same state."""
        with self._reader.begin() as connection:
            yield connection

    def lookup(self) -> Connection:
        """A connection without a transaction: each statement sees the newest commit."""
        return self._finder.connect()

    def commit_marker(self) -> object:
        """A value that changes with every commit of any process; while it is equal, nothing was committed."""
        if not self.is_sqlite:
            with self.lookup() as connection:
                return connection.execute(text("select pg_current_snapshot()::text")).scalar_one()
        with self._watcher_lock:
            if self._watcher is None:
                self._watcher = self._finder.raw_connection()
                self._cursor = self._watcher.cursor()
            self._cursor.execute("PRAGMA data_version")
            return self._cursor.fetchone()

    def timeline(self) -> str | None:
        """The line of history that the database is on: another one may lack commits that were seen, and have others.

        None: it is unknown, or the database has only one, as SQLite.
        """
        if not self._tells_timeline:
            return None
        with self.lookup() as connection:
            try:
                found: str | None = connection.execute(TIMELINE).scalar_one()
            except OperationalError:
                raise
            except DBAPIError:  # a service that is like PostgreSQL, and has no such files or does not tell
                self._tells_timeline, found = False, None
        return found

    def change_waiter(self, seconds: float) -> PollingWaiter | NotifyWaiter:
        """A waiter for changes of `commit_marker`; `seconds`: the shortest wait."""
        return PollingWaiter(seconds) if self.is_sqlite else NotifyWaiter(self.lookup, seconds)

    def wal_bytes(self) -> int:
        """The size of SQLite's write-ahead log."""
        return self._log.stat().st_size if self._log.exists() else 0

    def checkpoint(self) -> None:
        """Checkpoint SQLite's log, and truncate it if it is not in use; no writer waits for readers."""
        connection = self._finder.raw_connection()
        cursor = connection.cursor()
        try:
            cursor.execute("PRAGMA busy_timeout=0")
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)")  # most of the work, concurrent with writers
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            cursor.execute(f"PRAGMA busy_timeout={1000 * BUSY_SECONDS:.0f}")
            connection.close()

    def _classify_error(self, context: ExceptionContext) -> OperationalError | None:
        """Record damage, and turn errors by which a server refuses further changes into an OperationalError."""
        error = context.sqlalchemy_exception
        self.damaged = self.damaged or (error is not None and is_damage(error))
        if error is None or not needs_reconnect(error):
            return None
        context.is_disconnect = True  # a new connection may reach the new primary server
        return OperationalError(error.statement, error.params, context.original_exception)

    def close(self) -> None:
        """Close idle connections."""
        if self._watcher is not None:
            self._watcher.close()
        for engine in (self._writer, self._reader, self._finder):
            engine.dispose()


@contextmanager
def _lost_references() -> Iterator[None]:
    try:
        yield
    except IntegrityError as error:
        if is_lost_reference(error):
            raise DeletedMeanwhile from error
        raise


def is_sqlite(url: str) -> bool:
    """Whether a database is SQLite, a file that processes of one machine share."""
    return make_url(url).get_backend_name() == "sqlite"


def without_password(url: str) -> str:
    """A database's URL without its password."""
    return str(make_url(url).difference_update_query(["password"]))


def _server_engine(url: str, isolation_level: IsolationLevel, limit: int) -> Engine:
    kept = min(limit, IDLE_CONNECTIONS)
    # Pinged before each use, so that no request gets a dead connection after a restart of the server.
    return postgresql_engine(
        url,
        isolation_level=isolation_level,
        pool_pre_ping=True,
        pool_size=kept,
        max_overflow=limit - kept,
        pool_timeout=POOL_SECONDS,
    )


def _limit_idle_transactions(connection: Any, _: object) -> None:
    connection.execute(f"set idle_in_transaction_session_timeout = '{IDLE_SECONDS}s'")
    connection.commit()


def postgresql_engine(url: str, **options: Any) -> Engine:
    """An engine of a PostgreSQL server; settings in its URL override `SILENCE_LIMITS`."""
    url_options = make_url(url).query
    limits = {name: value for name, value in SILENCE_LIMITS.items() if name not in url_options}
    return create_engine(url, connect_args=limits, **options)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Use a write-ahead log. SQLite refuses to change a new file to it, without waiting, while another process does."""
    deadline = time.monotonic() + BUSY_SECONDS

    def pause(error: BaseException, number: int) -> float | None:
        is_busy = isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_BUSY
        return retry_forever(error, number) if is_busy and time.monotonic() < deadline else None

    for attempt in attempts(sqlite3.OperationalError, pause):
        with attempt:
            connection.execute("PRAGMA journal_mode=WAL")


def sqlite_engine(url: str, begin: str | None = None, *, foreign_keys: bool = True) -> Engine:
    """An engine of a SQLite file; `begin`: the statement that begins each transaction, None: the driver does."""
    engine = create_engine(
        url, pool_size=POOL_SIZE, max_overflow=-1, connect_args={"timeout": BUSY_SECONDS, "isolation_level": None}
    )

    def prepare(connection: sqlite3.Connection, _: object) -> None:
        prepare_sqlite(connection)
        connection.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
        _use_wal(connection)
        # An acknowledged write must survive a power failure, not only a kill.
        connection.execute("PRAGMA synchronous=FULL")
        if begin == "BEGIN IMMEDIATE":
            connection.execute(f"PRAGMA cache_size=-{WRITER_CACHE_KIB}")
            connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")

    event.listen(engine, "connect", prepare)
    if begin:
        # The driver would begin late, and not for DDL; this begins, and locks, explicitly.
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin) and None)
    return engine
