"""API keys: their rows, and the copy of them in each process (`ApiKeys`).

A key is 32 random bytes, so that its SHA-256 reveals nothing; only this hash is stored, never the key.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from concurrent.futures import Future
from typing import NamedTuple

from sqlalchemy import JSON, CheckConstraint, Column, Connection, Float, String, Table, delete, insert, select

from index.errors import shortened
from index.events import Event
from regraft.models import KeyScope
from service.background import Background
from service.errors import UnknownKey
from service.store.database.connections import Database
from service.store.outages import log_failure
from service.store.rows import all_of, first_of
from service.store.tables import metadata

logger = logging.getLogger(__name__)

PREFIX = "rg_"
"""The prefix of every key, by which secret scanners find keys in files."""
KEY_BYTES = 32
REFRESH_SECONDS = 1.0
"""The longest time between two reads: how long a key that another process deleted still works."""
MIN_REFRESH_SECONDS = 0.1
"""The shortest time between two reads, however many unknown keys are tried."""

api_key = Table(
    "api_key",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("sha256", String(64), nullable=False, unique=True),
    Column("scope", String(8), nullable=False),
    Column("created", Float, nullable=False),
    # Names of the galleries that it permits; null: all, and what belongs to no gallery.
    Column("galleries", JSON(none_as_null=True)),
    CheckConstraint("scope in ('query', 'ingest', 'admin')", name="scope"),
)


class ApiKeyRow(NamedTuple):
    """An API key; `galleries` None: it permits all galleries, and what belongs to no gallery."""

    name: str
    sha256: str
    scope: KeyScope
    created: float
    galleries: list[str] | None

    def opens(self, gallery: str) -> bool:
        """Whether it permits this gallery."""
        return self.galleries is None or gallery in self.galleries


def add_key(connection: Connection, name: str, scope: KeyScope, galleries: list[str] | None) -> tuple[ApiKeyRow, str]:
    """Create a key; returns its row and the key itself. Raises IntegrityError if the name is taken."""
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    row = ApiKeyRow(name, digest(key.encode()), scope, time.time(), galleries)
    connection.execute(insert(api_key).values(row._asdict()))
    return row, key


def key_named(connection: Connection, name: str) -> ApiKeyRow:
    """The row of a key. Raises UnknownKey."""
    row = first_of(ApiKeyRow, connection.execute(select(api_key).where(api_key.c.name == name)))
    if row is None:
        raise UnknownKey(f"key {shortened(name)!r} does not exist")
    return row


def all_keys(connection: Connection) -> list[ApiKeyRow]:
    """Every key, by name."""
    return all_of(ApiKeyRow, connection.execute(select(api_key).order_by(api_key.c.name)))


def delete_key(connection: Connection, name: str) -> None:
    """Delete a key, if it exists."""
    connection.execute(delete(api_key).where(api_key.c.name == name))


def digest(key: bytes) -> str:
    """The SHA-256 of a key in hex, which is stored instead of the key."""
    return hashlib.sha256(key).hexdigest()


class ApiKeys(Background):
    """This process's copy of the keys, refreshed by a thread, so that requests need not read them from the database."""

    def __init__(self, database: Database, *, checked: bool) -> None:
        """`checked`: whether requests need a key; without an API key in the settings, none is checked."""
        super().__init__("keys")
        self._database, self._checked = database, checked
        self._by_digest: dict[str, ApiKeyRow] = {}
        self._refresh_lock = threading.Lock()
        self._next_refresh: Future[None] = Future()
        self._refresh_requested = threading.Event()

    def start(self) -> None:
        """Read the keys, and start the thread."""
        self.refresh()
        if self._by_digest and not self._checked:
            hint = "set REGRAFT_API_KEY: without it, programs on this machine need no key, and all may do everything"
            logger.warning(Event("keys_not_checked", keys=len(self._by_digest), hint=hint))
        super().start()

    def find(self, key: bytes) -> ApiKeyRow | None:
        """The row of a key as of the last refresh; None: it did not exist."""
        return self._by_digest.get(digest(key))

    def is_current(self, row: ApiKeyRow) -> bool:
        """Whether a key still existed, unchanged, at the last refresh."""
        return self._by_digest.get(row.sha256) == row

    def next_refresh(self) -> Future[None]:
        """Request a refresh; the future gets the result, or the error, of one that began after this call."""
        refresh = self._next_refresh
        self._refresh_requested.set()
        return refresh

    def refresh(self) -> None:
        """Read the keys from the database."""
        with self._refresh_lock, self._database.lookup() as connection:
            self._by_digest = {row.sha256: row for row in all_keys(connection)}

    def _run(self) -> None:
        failed = False
        while not self._stop.wait(MIN_REFRESH_SECONDS):
            self._refresh_requested.wait(REFRESH_SECONDS - MIN_REFRESH_SECONDS)
            self._refresh_requested.clear()
            due, self._next_refresh = self._next_refresh, Future()
            try:
                self.refresh()
            except Exception as error:  # the old copy stays valid; the next refresh may succeed
                if not failed:
                    log_failure(logger, Event("keys_unread"), error)
                failed = True
                due.set_exception(error)
            else:
                failed = False
                due.set_result(None)

    def _wake(self) -> None:
        self._refresh_requested.set()
