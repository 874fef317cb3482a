"""Ask an image store that failed again: readiness would report the failure until an image is next read or stored."""

from __future__ import annotations

import logging

from index.events import Event
from service.background import Background
from service.logs import RecurringErrors
from service.store.image_store.blobs import Blobs

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
STOP_SECONDS = 1.0
"""How long `stop` waits: a store that hangs takes half a minute, and this thread changes nothing in the database."""


class StoreRecovery(Background):
    """A thread that asks the store again after a failure; while there is none, it sends no requests."""

    def __init__(self, blobs: Blobs) -> None:
        super().__init__("image-store", STOP_SECONDS)
        self._blobs = blobs
        self._errors = RecurringErrors(logger)

    def look(self) -> None:
        """Ask the store if its last answer was a failure."""
        if self._blobs.problem is None:
            return
        self._blobs.check_again()
        if self._blobs.problem is None:
            logger.info(Event("store_back"))

    def _run(self) -> None:
        while not self._stop.wait(RETRY_SECONDS):
            self._errors.attempt(Event("store_not_checked"), self.look)
