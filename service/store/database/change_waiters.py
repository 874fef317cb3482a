"""Wait for changes in the database: by polling on SQLite, by LISTEN and NOTIFY on PostgreSQL.

By migration 0014, PostgreSQL notifies of each transaction that changes a gallery's row, a version or an edge. A
notification only says that something changed: a lost one, or a pooler that passes none on, causes a delay of a second.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from index.events import Event

logger = logging.getLogger(__name__)

CHANNEL = "regraft"
MAX_WAIT_SECONDS = 1.0
"""The longest wait without a notification, and the pause between two attempts to listen."""


class PollingWaiter:
    """Waits a fixed time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stopped = threading.Event()

    def wait(self) -> bool:
        """Wait until something may have changed; False: `stop` was called."""
        return not self._stopped.wait(self._seconds)

    def stop(self) -> None:
        """End the current wait and all later ones."""
        self._stopped.set()

    def close(self) -> None:
        """Free resources, after the last wait."""


class NotifyWaiter:
    """Waits for notifications of PostgreSQL; polls while it has no connection. Only one thread may wait."""

    def __init__(self, connect: Callable[[], Connection], seconds: float) -> None:
        """`connect`: gives a connection without transactions; `seconds`: the shortest wait."""
        self._connect = connect
        self._poll = PollingWaiter(seconds)
        self._connection: Connection | None = None
        self._last_attempt = float("-inf")
        self._stop_reader, self._stop_writer = os.pipe()

    def wait(self) -> bool:
        """Wait until something may have changed, at least the shortest wait; False: `stop` was called."""
        if not self._poll.wait():  # so that one check covers many commits
            return False
        if self._connection is None:
            self._listen()
            return True  # changes before the connection caused no notification
        try:
            driver: Any = self._connection.connection.dbapi_connection
            with selectors.DefaultSelector() as selector:
                for readable in (driver.fileno(), self._stop_reader):
                    selector.register(readable, selectors.EVENT_READ)
                selector.select(MAX_WAIT_SECONDS)
            for _ in driver.notifies(timeout=0):
                pass  # whatever changed, all galleries are checked
        except Exception as error:  # whatever the driver raises for a lost connection
            logger.warning(Event("notifications_lost", reason=error))
            self._disconnect()
        return True

    def stop(self) -> None:
        """End the current wait and all later ones."""
        self._poll.stop()
        os.write(self._stop_writer, b"\0")

    def close(self) -> None:
        """Free resources, after the last wait."""
        self._disconnect()
        for end in (self._stop_reader, self._stop_writer):
            os.close(end)

    def _listen(self) -> None:
        if time.monotonic() - self._last_attempt < MAX_WAIT_SECONDS:
            return
        self._last_attempt = time.monotonic()
        with suppress(SQLAlchemyError, OSError):  # the caller's next query reports an unreachable server
            connection = self._connect()
            try:
                connection.execute(text(f"LISTEN {CHANNEL}"))
            except BaseException:  # such as of a server in recovery, which answers queries and refuses this
                connection.close()
                raise
            connection.detach()  # keep the listening connection out of the pool
            self._connection = connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # it may be lost already
                connection.close()
