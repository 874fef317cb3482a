"""Log an unreachable database: one line a minute for all threads of the process, in place of a traceback of each.

A thread's other errors are logged as its own.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time

from sqlalchemy.exc import DBAPIError

from index.events import Event
from service.logs import REPEAT_SECONDS, RecurringErrors
from service.store.faults import is_unreachable

logger = logging.getLogger(__name__)


class OutageLog:
    """Logs that the database is unreachable, at most once a minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged_at = -math.inf

    def log(self, error: BaseException) -> None:
        """Log the cause unless an outage was logged within REPEAT_SECONDS."""
        with self._lock:
            now = time.monotonic()
            if now - self._logged_at < REPEAT_SECONDS:
                return
            self._logged_at = now
        cause = error.orig if isinstance(error, DBAPIError) else error
        logger.error(Event("database_unavailable", reason=str(cause).partition("\n")[0]))


OUTAGES = OutageLog()
"""That of this process."""


class RecurringFaults(RecurringErrors):
    """Recurring errors of work that needs the database."""

    def log(self, event: Event) -> None:
        """Log the exception being handled: an outage in the line of all threads, others as `RecurringErrors` does."""
        error = sys.exception()
        if error is not None and is_unreachable(error):
            OUTAGES.log(error)
        else:
            super().log(event)


def log_failure(log: logging.Logger, event: Event, error: BaseException) -> None:
    """Log `event` with the error's traceback or, if it is an outage, the line of all threads."""
    if is_unreachable(error):
        OUTAGES.log(error)
    else:
        log.error(event, exc_info=error)
