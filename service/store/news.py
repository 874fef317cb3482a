"""News: what wakes whoever follows the database - the clock on SQLite, the server's notifications on PostgreSQL.

Migration 0014 has PostgreSQL notify in the transaction that changes a gallery's row, a version or an edge. What is
notified is only that it is worth a look: a notification that is lost, or a pooler that passes none on, costs a second.
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
LOOK_SECONDS = 1.0
"""So long without a notification, and it is looked all the same; as often a lost connection is tried again."""


class Clock:
    """News every so often."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._woken = threading.Event()

    def wait(self) -> bool:
        """Until there may be news; False: `wake` was called."""
        return not self._woken.wait(self._seconds)

    def wake(self) -> None:
        """End this wait and every other, for good."""
        self._woken.set()

    def close(self) -> None:
        """After the last wait."""


class Notifications:
    """News as PostgreSQL notifies of them; by the clock while it cannot be listened to. One thread waits."""

    def __init__(self, connect: Callable[[], Connection], seconds: float) -> None:
        """`connect`: gives a connection without transactions; `seconds`: how often to look while there is none."""
        self._connect, self._clock = connect, Clock(seconds)
        self._connection: Connection | None = None
        self._tried = float("-inf")
        self._heard, self._waking = os.pipe()

    def wait(self) -> bool:
        """Until there may be news, as long as the clock at least; False: `wake` was called."""
        if not self._clock.wait():  # many commits are one look
            return False
        if self._connection is None:
            self._listen()
            return True  # of what came before there was a connection nobody told
        driver: Any = self._connection.connection.dbapi_connection
        try:
            with selectors.DefaultSelector() as selector:
                for one in (driver.fileno(), self._heard):
                    selector.register(one, selectors.EVENT_READ)
                selector.select(LOOK_SECONDS)
            for _ in driver.notifies(timeout=0):
                pass  # which gallery it was, the look asks for all at once
        except Exception as error:  # whatever the driver says of a connection that is gone
            logger.warning(Event("notifications_lost", reason=error))
            self._leave()
        return True

    def wake(self) -> None:
        """End this wait and every other, for good."""
        self._clock.wake()
        os.write(self._waking, b"\0")

    def close(self) -> None:
        """After the last wait."""
        self._leave()
        for end in (self._heard, self._waking):
            os.close(end)

    def _listen(self) -> None:
        if time.monotonic() - self._tried < LOOK_SECONDS:
            return
        self._tried = time.monotonic()
        with suppress(SQLAlchemyError, OSError):  # whoever looks meanwhile says that there is no server
            connection = self._connect()
            connection.detach()  # nobody else is given a connection that listens
            self._connection = connection
            connection.execute(text(f"LISTEN {CHANNEL}"))

    def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # it may be gone
                connection.close()
