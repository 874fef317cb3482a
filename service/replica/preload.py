"""Galleries that are loaded when a process starts, before it says that it is ready: no first query waits.

Elsewhere a gallery is loaded when it is asked for first, which of a large one takes seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from sqlalchemy.exc import OperationalError

from index.events import Event
from service.background import Background
from service.errors import UnknownGallery
from service.logs import RecurringErrors
from service.replica.replica import Replica
from service.store.database import Database
from service.store.repository import all_galleries

logger = logging.getLogger(__name__)

EVERY = "*"
PAUSE_SECONDS = 1.0
"""So long after the database was away it is asked again."""


class Preload(Background):
    """Loads the galleries of these names, or every one, one after the other in a thread."""

    def __init__(self, database: Database, replica: Replica, names: Collection[str]) -> None:
        """`names`: of galleries; `*` among them: of every one, as many as fit into the memory there is for them."""
        super().__init__("preload")
        self._database, self._replica, self._names = database, replica, names
        self._errors = RecurringErrors(logger)
        self.loading: str | None = EVERY if names else None
        """The gallery that is being loaded; None: all are."""

    def start(self) -> None:
        """Begin to load."""
        if self._names:
            super().start()

    def _run(self) -> None:
        while not self._errors.attempt(Event("galleries_not_preloaded"), self._load):
            if self._stop.wait(PAUSE_SECONDS):
                break
        self.loading = None

    def _load(self) -> None:
        cache = self._replica.cache
        for name in self._wanted():
            if self._stop.is_set() or (cache.loaded() and cache.bytes() >= cache.limit):
                break  # what does not fit would only push out what was just loaded
            self.loading = name
            try:
                self._replica.find(name)
            except UnknownGallery:
                logger.warning(Event("preloaded_gallery_unknown", gallery=name))
            except OperationalError:  # the database is away, for all of them
                raise
            except Exception:  # one damaged gallery must not hold up the others; whoever asks for it is told
                logger.exception(Event("gallery_not_preloaded", gallery=name))

    def _wanted(self) -> list[str]:
        if EVERY not in self._names:
            return list(self._names)
        with self._database.lookup() as connection:
            return [row.name for row in all_galleries(connection)]
