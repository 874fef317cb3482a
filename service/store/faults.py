"""What a database or a disk says when it is damaged, full or not ours to write, in the words of each of them."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from service.errors import DatabaseDamaged, StorageFull, StorageReadOnly

FULL = {errno.ENOSPC, errno.EDQUOT}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
FULL_SQLSTATE = "53100"
"""PostgreSQL's disk_full."""
FOREIGN_KEY_SQLSTATE = "23503"
"""PostgreSQL's foreign_key_violation."""
AWAY_SQLSTATES = {"25006", "25P03", "25P04"}
"""PostgreSQL's read_only_sql_transaction, as a primary that became a standby has it, and the ends of sessions whose
transaction rested or lasted too long (idle_in_transaction_session_timeout, transaction_timeout)."""
PRIMARY = 0xFF
"""The part of SQLite's error codes that is not about details."""
HEADER = b"SQLite format 3\0"
CHECKED_BYTES = 256 << 20
"""Of a larger database only header and schema are looked at when it is opened: all of it takes too long."""


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no more space."""
    if isinstance(error, DBAPIError):
        full = _sqlite_code(error) == sqlite3.SQLITE_FULL
        return full or getattr(error.orig, "sqlstate", None) == FULL_SQLSTATE
    return isinstance(error, OSError) and error.errno in FULL


def read_only(error: BaseException) -> StorageReadOnly | None:
    """The error of a write that is not allowed to this process; None where the error is another."""
    if isinstance(error, DBAPIError) and _sqlite_code(error) == sqlite3.SQLITE_READONLY:
        return StorageReadOnly("nothing was changed: the service may not write to its database")
    if isinstance(error, OSError) and error.errno in FORBIDDEN:
        return StorageReadOnly(f"the service may not write there: {error}")
    return None


def unwritable(places: Iterable[Path]) -> list[Path]:
    """Those of the folders and files that are there, and that this process may not write to."""
    return [place for place in places if place.exists() and not os.access(place, os.W_OK)]


def is_damage(error: BaseException) -> bool:
    """Whether an error says that a SQLite file is not what it should be."""
    return isinstance(error, DBAPIError) and _sqlite_code(error) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def is_busy(error: BaseException) -> bool:
    """Whether an error says that somebody else writes to a SQLite file for longer than anybody waits."""
    return isinstance(error, DBAPIError) and _sqlite_code(error) == sqlite3.SQLITE_BUSY


def is_away(error: BaseException) -> bool:
    """Whether an error says that a server takes no changes over this connection any more."""
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in AWAY_SQLSTATES


def is_lost_reference(error: DBAPIError) -> bool:
    """Whether a row was to refer to one that is not there any more; not whether one is still referred to."""
    broken = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY
    broken = broken or getattr(error.orig, "sqlstate", None) == FOREIGN_KEY_SQLSTATE
    return broken and not (error.statement or "").lstrip().upper().startswith("DELETE")


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database; None while there is nothing in it."""
    name = make_url(url).database
    path = Path(name or "")
    there = name and name != ":memory:" and path.is_file() and path.stat().st_size
    return path if there else None


def takes_long(path: Path) -> bool:
    """Whether a SQLite file is too large to be looked at as a whole each time it is opened."""
    return path.stat().st_size > CHECKED_BYTES


def check_sqlite(url: str, *, thorough: bool = False) -> None:
    """Look at a SQLite file before anything is done with it; `thorough`: at all of it, its indexes too, however large.

    Raises DatabaseDamaged.
    """
    path = sqlite_file(url)
    if path is None:
        return
    with path.open("rb") as stream:
        if stream.read(len(HEADER)) != HEADER:
            raise damaged(url, "it does not begin as a SQLite file does")
    connection = sqlite3.connect(path, timeout=30)
    try:
        connection.execute("select count(*) from sqlite_master").fetchone()
        if thorough or not takes_long(path):
            check = "integrity_check" if thorough else "quick_check"
            (found,) = connection.execute(f"pragma {check}(1)").fetchone()
            if found != "ok":
                raise damaged(url, " ".join(found.split()))
            check_references(connection, url)
    except sqlite3.OperationalError:
        pass  # locked or out of reach: whoever opens it next says so
    except sqlite3.DatabaseError as error:
        raise damaged(url, str(error)) from error
    finally:
        connection.close()


def check_references(connection: sqlite3.Connection, url: str) -> None:
    """Raise DatabaseDamaged where a row refers to one that is not there; every row is looked at."""
    if broken := connection.execute("PRAGMA foreign_key_check").fetchone():
        raise damaged(url, f"a row of {broken[0]!r} refers to one of {broken[2]!r} that is not there")


def damaged(url: str, why: str) -> DatabaseDamaged:
    """The error of a database, with what to do about it."""
    path = make_url(url).database
    return DatabaseDamaged(
        f"the database {path} is damaged ({why}). Stop every process that uses it, then restore it from a backup,"
        f" or save what can be read of it: sqlite3 {path} .recover | sqlite3 recovered.db"
    )


def _sqlite_code(error: DBAPIError) -> int | None:
    code = getattr(error.orig, "sqlite_errorcode", None)
    return None if code is None else code & PRIMARY


class DiskSpace:
    """What is left on the disk of the data folder, and whether it took what was last written."""

    def __init__(self, folder: Path, least_bytes: int) -> None:
        self._folder = folder
        self._least = least_bytes
        self._refused = False

    def note_refused(self) -> None:
        """Something could not be written, for want of space."""
        self._refused = True

    def problem(self) -> str | None:
        """Why nothing more should be expected to be stored, None: no reason is known."""
        if self._refused and self._takes():
            self._refused = False
        if self._refused:
            return f"the disk of {self._folder} is full: what was last written did not fit"
        free = shutil.disk_usage(self._folder).free
        if free < self._least:
            return f"the disk of {self._folder} has {free >> 20} MiB left, less than {self._least >> 20} MiB"
        return None

    def _takes(self) -> bool:
        try:
            with tempfile.TemporaryFile(dir=self._folder) as stream:
                stream.write(bytes(1 << 16))
                stream.flush()
        except OSError:
            return False
        return True


def refused(error: BaseException) -> StorageFull:
    """The error of a write that found no space."""
    return StorageFull(f"nothing was stored: there is no space left ({error})".splitlines()[0])
