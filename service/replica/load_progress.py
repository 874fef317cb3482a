"""The progress of loading a gallery, for readiness checks, the gallery's description and the log."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from index.events import Event

logger = logging.getLogger(__name__)

LOG_SECONDS = 5.0
"""How often progress is logged; a load that takes less is not logged."""


@dataclass
class LoadProgress:
    """The progress of one load.

    Attributes:
        gallery: its name.
        total: items to load, 0 until they are counted.
        done: items in memory.
    """

    gallery: str
    total: int = 0
    done: int = 0
    _began: float = field(default_factory=time.monotonic)
    _logged: float = field(default_factory=time.monotonic)

    def add(self, items: int) -> None:
        """Count items that were loaded."""
        self.done += items
        if (now := time.monotonic()) - self._logged > LOG_SECONDS:
            self._logged = now
            logger.info(Event("gallery_loading", gallery=self.gallery, done=self.done, total=self.total))

    def end(self) -> None:
        """Log the end of the load."""
        if (seconds := time.monotonic() - self._began) > LOG_SECONDS:
            logger.info(Event("gallery_loaded", gallery=self.gallery, items=self.done, seconds=round(seconds, 1)))
