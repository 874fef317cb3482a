"""API keys by name: what is stored of them, and what a process knows of them.

A key is 32 random bytes, so that its SHA-256 alone tells nothing of it; the key itself is stored nowhere.
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

from index.events import Event
from regraft.models import KeyScope
from service.background import Background
from service.errors import UnknownKey
from service.store.database import Database
from service.store.rows import all_of, first_of
from service.store.tables import metadata

logger = logging.getLogger(__name__)

PREFIX = "rg_"
"""What a key begins with, so that those who look for secrets in files find it."""
KEY_BYTES = 32
READ_SECONDS = 1.0
"""So long, at most, a key that another process deleted still opens what it did."""
PAUSE_SECONDS = 0.1
"""Between two reads: guesses of keys cost the database no more."""

api_key = Table(
    "api_key",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("sha256", String(64), nullable=False, unique=True),
    Column("scope", String(8), nullable=False),
    Column("created", Float, nullable=False),
    # Their names, as paths have them; null: it opens all, and what belongs to none.
    Column("galleries", JSON(none_as_null=True)),
    CheckConstraint("scope in ('query', 'ingest', 'admin')", name="scope"),
)


class ApiKeyRow(NamedTuple):
    """A key that is asked for."""

    name: str
    sha256: str
    scope: KeyScope
    created: float
    galleries: list[str] | None

    def opens(self, gallery: str) -> bool:
        """Whether it is a key of this gallery, or of all."""
        return self.galleries is None or gallery in self.galleries


def add_key(connection: Connection, name: str, scope: KeyScope, galleries: list[str] | None) -> tuple[ApiKeyRow, str]:
    """Make a key; returns it as stored, and itself. Raises IntegrityError where there is one of this name."""
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    row = ApiKeyRow(name, digest(key.encode()), scope, time.time(), galleries)
    connection.execute(insert(api_key).values(row._asdict()))
    return row, key


def key_named(connection: Connection, name: str) -> ApiKeyRow:
    """One key. Raises UnknownKey."""
    row = first_of(ApiKeyRow, connection.execute(select(api_key).where(api_key.c.name == name)))
    if row is None:
        raise UnknownKey(f"no key is named {name!r}")
    return row


def all_keys(connection: Connection) -> list[ApiKeyRow]:
    """Every key, by name."""
    return all_of(ApiKeyRow, connection.execute(select(api_key).order_by(api_key.c.name)))


def delete_key(connection: Connection, name: str) -> None:
    """Ask for this key no more."""
    connection.execute(delete(api_key).where(api_key.c.name == name))


def digest(key: bytes) -> str:
    """What is stored of a key."""
    return hashlib.sha256(key).hexdigest()


class ApiKeys(Background):
    """The keys that this process knows; one thread reads them again and again, so that no request takes one for it."""

    def __init__(self, database: Database) -> None:
        super().__init__("keys")
        self._database = database
        self._known: dict[str, ApiKeyRow] = {}
        self._reading = threading.Lock()
        self._next: Future[None] = Future()
        self._wanted = threading.Event()

    def start(self) -> None:
        """Know the keys there are, and go on looking."""
        self.read()
        super().start()

    def known(self, key: bytes) -> ApiKeyRow | None:
        """Whose key this is, as far as this process knows."""
        return self._known.get(digest(key))

    def holds(self, key: ApiKeyRow) -> bool:
        """Whether a key that was known is there still."""
        return self._known.get(key.sha256) == key

    def next_read(self) -> Future[None]:
        """A read that begins from now on, soon: another process may have made a key just now. Holds what it raised."""
        due = self._next
        self._wanted.set()
        return due

    def read(self) -> None:
        """Learn the keys there are now."""
        with self._reading, self._database.lookup() as connection:
            self._known = {row.sha256: row for row in all_keys(connection)}

    def _run(self) -> None:
        failed = False
        while not self._stop.wait(PAUSE_SECONDS):
            self._wanted.wait(READ_SECONDS - PAUSE_SECONDS)
            self._wanted.clear()
            due, self._next = self._next, Future()
            try:
                self.read()
            except Exception as error:  # those known open what they did; the next look may succeed
                if not failed:
                    logger.exception(Event("keys_unread"))
                failed = True
                due.set_exception(error)
            else:
                failed = False
                due.set_result(None)

    def _wake(self) -> None:
        self._wanted.set()
