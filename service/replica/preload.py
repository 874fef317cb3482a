"""Preload galleries when a process starts, before it reports that it is ready, so that first queries do not wait.

Other galleries are loaded on first use, which takes seconds for a large one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from sqlalchemy.exc import OperationalError

from index.events import Event
from service.background import Background
from service.errors import UnknownGallery
from service.replica.replica import Replica
from service.store.database.connections import Database
from service.store.galleries.gallery import all_galleries
from service.store.outages import RecurringFaults

logger = logging.getLogger(__name__)

EVERY = "*"
PAUSE_SECONDS = 1.0
"""Pause before a retry if the database was unreachable."""


class Preload(Background):
    """A thread that loads the named galleries, or all, one after the other."""

    def __init__(self, database: Database, replica: Replica, names: Collection[str]) -> None:
        """`names`: of galleries; `*` stands for all. As many are loaded as fit into the memory for galleries."""
        super().__init__("preload")
        self._database, self._replica, self._names = database, replica, names
        self._errors = RecurringFaults(logger)
        self.loading: str | None = EVERY if names else None
        """The name of the gallery that is being loaded; None: all are loaded."""

    def start(self) -> None:
        """Start the thread, if there is anything to load."""
        if self._names:
            super().start()

    def _run(self) -> None:
        while not self._errors.attempt(Event("galleries_not_preloaded"), self._load):
            if self._stop.wait(PAUSE_SECONDS):
                break
        self.loading = None

    def _load(self) -> None:
        cache = self._replica.cache
        for name in self._names_to_load():
            if self._stop.is_set() or cache.bytes() >= cache.limit:
                break  # one more would only evict what was just loaded
            self.loading = name
            try:
                self._replica.find(name)
            except UnknownGallery:
                logger.warning(Event("preloaded_gallery_unknown", gallery=name))
            except OperationalError:  # the database is unreachable, for all galleries
                raise
            except Exception:  # a damaged gallery must not block the others; its queries return the error
                logger.exception(Event("gallery_not_preloaded", gallery=name))

    def _names_to_load(self) -> list[str]:
        if EVERY not in self._names:
            return list(self._names)
        with self._database.lookup() as connection:
            return [row.name for row in all_galleries(connection)]
