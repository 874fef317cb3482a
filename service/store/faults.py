"""Faults of the database and the disk: which errors mean full, read-only, damaged or busy, and checks for them."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from service.errors import DatabaseDamaged, StorageFull, StorageReadOnly

FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
FORBIDDEN_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS}
FULL_SQLSTATE = "53100"
"""PostgreSQL's disk_full."""
FOREIGN_KEY_SQLSTATE = "23503"
"""PostgreSQL's foreign_key_violation."""
RECONNECT_SQLSTATES = {"25006", "25P03", "25P04"}
"""PostgreSQL's read_only_sql_transaction, from a primary that became a standby, and idle_in_transaction_session_timeout
and transaction_timeout, which end sessions."""
AWAY_SQLSTATES = {"57P01", "57P02", "57P03", "53300"}
"""PostgreSQL's admin_shutdown, crash_shutdown, cannot_connect_now (it starts or stops) and too_many_connections."""
CONNECTION_SQLSTATES = "08"
"""PostgreSQL's class of connection exceptions."""
PRIMARY_CODE = 0xFF
"""The bits of SQLite's extended result codes that are the primary code."""
SQLITE_HEADER = b"SQLite format 3\0"
CHECKED_BYTES = 256 << 20
"""Of a larger SQLite file, only header and schema are checked when it is opened, as a complete check takes too long."""


def is_full(error: BaseException) -> bool:
    """Whether an error means that no space is left."""
    if isinstance(error, DBAPIError):
        full = _sqlite_code(error) == sqlite3.SQLITE_FULL
        return full or getattr(error.orig, "sqlstate", None) == FULL_SQLSTATE
    return isinstance(error, OSError) and error.errno in FULL_ERRNOS


def storage_read_only(error: BaseException) -> StorageReadOnly | None:
    """The error to return for one that means that this process may not write; None for any other error."""
    if isinstance(error, DBAPIError) and _sqlite_code(error) == sqlite3.SQLITE_READONLY:
        return StorageReadOnly("nothing was changed: the service has no permission to write to its database")
    if isinstance(error, OSError) and error.errno in FORBIDDEN_ERRNOS:
        return StorageReadOnly(f"the service has no permission to write: {error}")
    return None


def unwritable(paths: Iterable[Path]) -> list[Path]:
    """The existing folders and files among `paths` that this process may not write to."""
    return [path for path in paths if path.exists() and not os.access(path, os.W_OK)]


def is_damage(error: BaseException) -> bool:
    """Whether an error means that a SQLite file is damaged."""
    return isinstance(error, DBAPIError) and _sqlite_code(error) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def is_busy(error: BaseException) -> bool:
    """Whether an error means that another writer held a SQLite file for longer than the busy timeout."""
    return isinstance(error, DBAPIError) and _sqlite_code(error) == sqlite3.SQLITE_BUSY


def needs_reconnect(error: BaseException) -> bool:
    """Whether an error means that a server accepts no more changes over this connection."""
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in RECONNECT_SQLSTATES


def is_unreachable(error: BaseException) -> bool:
    """Whether an error means that the database does not answer, accepts no changes now, or is locked by others."""
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated or is_busy(error) or needs_reconnect(error):
        return True
    state = getattr(error.orig, "sqlstate", "")
    never_connected = state is None and isinstance(error, OperationalError)
    return never_connected or (state or "").startswith(CONNECTION_SQLSTATES) or state in AWAY_SQLSTATES


def is_lost_reference(error: DBAPIError) -> bool:
    """Whether an insert or update refers to a missing row; False for a delete of a row that others refer to."""
    broken = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY
    broken = broken or getattr(error.orig, "sqlstate", None) == FOREIGN_KEY_SQLSTATE
    return broken and not (error.statement or "").lstrip().upper().startswith("DELETE")


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database; None if it is missing, empty or not a file."""
    name = make_url(url).database
    path = Path(name or "")
    exists = name and name != ":memory:" and path.is_file() and path.stat().st_size
    return path if exists else None


def is_large(path: Path) -> bool:
    """Whether a SQLite file is too large to be checked completely each time it is opened."""
    return path.stat().st_size > CHECKED_BYTES


def check_sqlite(url: str, *, thorough: bool = False) -> None:
    """Check a SQLite file before it is used; `thorough`: completely, with its indexes, however large it is.

    Raises:
        DatabaseDamaged: it is damaged.
    """
    path = sqlite_file(url)
    if path is None:
        return
    with path.open("rb") as stream:
        if stream.read(len(SQLITE_HEADER)) != SQLITE_HEADER:
            raise damage_error(url, "it is not a SQLite file")
    connection = sqlite3.connect(path, timeout=30)
    try:
        connection.execute("select count(*) from sqlite_master").fetchone()
        if thorough or not is_large(path):
            check = "integrity_check" if thorough else "quick_check"
            (found,) = connection.execute(f"pragma {check}(1)").fetchone()
            if found != "ok":
                raise damage_error(url, " ".join(found.split()))
            check_references(connection, url)
    except sqlite3.OperationalError:
        pass  # locked or unreachable: opening it reports that
    except sqlite3.DatabaseError as error:
        raise damage_error(url, str(error)) from error
    finally:
        connection.close()


def check_references(connection: sqlite3.Connection, url: str) -> None:
    """Check every foreign key. Raises DatabaseDamaged if a row refers to a missing one."""
    if broken := connection.execute("PRAGMA foreign_key_check").fetchone():
        raise damage_error(url, f"a row of {broken[0]!r} refers to a missing row of {broken[2]!r}")


def damage_error(url: str, why: str) -> DatabaseDamaged:
    """The error for a damaged database, with advice."""
    path = make_url(url).database
    return DatabaseDamaged(
        f"the database {path} is damaged ({why}). Stop every process that uses it, then restore it from a backup,"
        f" or save what can be read of it: sqlite3 {path} .recover | sqlite3 recovered.db"
    )


def _sqlite_code(error: DBAPIError) -> int | None:
    code = getattr(error.orig, "sqlite_errorcode", None)
    return None if code is None else code & PRIMARY_CODE


class DiskSpace:
    """The free space on the data folder's disk, and whether a write failed for lack of it."""

    def __init__(self, folder: Path, min_free_bytes: int) -> None:
        self._folder = folder
        self._min_free_bytes = min_free_bytes
        self._is_full = False

    def note_full(self) -> None:
        """Record that a write failed for lack of space."""
        self._is_full = True

    def problem(self) -> str | None:
        """Why writes are likely to fail; None: they are not."""
        if self._is_full and self._accepts_write():
            self._is_full = False
        if self._is_full:
            return f"the disk of {self._folder} is full: the last write failed"
        free = shutil.disk_usage(self._folder).free
        if free < self._min_free_bytes:
            return f"the disk of {self._folder} has {free >> 20} MiB left, less than {self._min_free_bytes >> 20} MiB"
        return None

    def _accepts_write(self) -> bool:
        try:
            with tempfile.TemporaryFile(dir=self._folder) as stream:
                stream.write(bytes(1 << 16))
                stream.flush()
        except OSError:
            return False
        return True


def storage_full(error: BaseException) -> StorageFull:
    """The error to return for a write that failed for lack of space."""
    return StorageFull(f"nothing was stored: no space left ({error})".splitlines()[0])
