"""Checkpoint SQLite's write-ahead log while nobody writes; otherwise a start after a crash would first copy all of it.

SQLite itself does so once the log is long, and when the last connection is closed, which a killed process does not do.
"""

from __future__ import annotations

import logging

from index.events import Event
from service.background import Background
from service.store.database.connections import Database
from service.store.outages import RecurringFaults

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Pause between two checks; a checkpoint requires that nothing was committed meanwhile."""
LEAST_BYTES = 4 << 20
"""Least size of the log; a shorter one is copied in some milliseconds."""


class Checkpoints(Background):
    """A thread that checks whether a checkpoint is due."""

    def __init__(self, database: Database) -> None:
        super().__init__("checkpoints")
        self._database = database
        # The commit marker of the last check.
        self._seen: object = None
        self._errors = RecurringFaults(logger)

    def start(self) -> None:
        """Start the thread, if the database is SQLite."""
        if self._database.is_sqlite:
            super().start()

    def look(self) -> None:
        """Checkpoint the log if nothing was committed since the last check; it stays if somebody reads."""
        moment = self._database.commit_marker()
        if moment == self._seen and self._database.wal_bytes() >= LEAST_BYTES:
            self._database.checkpoint()
        self._seen = moment

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self._errors.attempt(Event("log_not_written_back"), self.look)
