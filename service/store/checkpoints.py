"""SQLite's log, written back while nobody writes: else a start after a crash would read and copy all of it first.

SQLite itself does so once the log is long, and when the last connection is closed, which a killed process does not do.
"""

from __future__ import annotations

import logging

from index.events import Event
from service.background import Background
from service.logs import RecurringErrors
from service.store.database import Database

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""So long nothing was committed."""
LEAST_BYTES = 4 << 20
"""A shorter log is read and copied in some milliseconds."""


class Checkpoints(Background):
    """A thread that looks whether it is time."""

    def __init__(self, database: Database) -> None:
        super().__init__("checkpoints")
        self._database = database
        # What the database stood at when it was looked at last.
        self._seen: object = None
        self._errors = RecurringErrors(logger)

    def start(self) -> None:
        """Begin looking, where there is such a log."""
        if self._database.is_sqlite:
            super().start()

    def look(self) -> None:
        """Write the log back if nothing was committed since the last look; where somebody reads, another time."""
        moment = self._database.commit_marker()
        if moment == self._seen and self._database.wal_bytes() >= LEAST_BYTES:
            self._database.checkpoint()
        self._seen = moment

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self._errors.attempt(Event("log_not_written_back"), self.look)
