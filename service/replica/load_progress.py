"""How far the load of a gallery is: for readiness, for who asks for the gallery, and for the log."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from index.events import Event

logger = logging.getLogger(__name__)

TOLD_SECONDS = 5.0
"""How often the log tells it; of a load that took no longer it says nothing."""


@dataclass
class LoadProgress:
    """A load under way.

    Attributes:
        gallery: its name.
        total: items there are, 0 as long as nobody has counted.
        done: items in memory.
    """

    gallery: str
    total: int = 0
    done: int = 0
    _began: float = field(default_factory=time.monotonic)
    _told: float = field(default_factory=time.monotonic)

    def add(self, items: int) -> None:
        """So many more are in memory."""
        self.done += items
        if (now := time.monotonic()) - self._told > TOLD_SECONDS:
            self._told = now
            logger.info(Event("gallery_loading", gallery=self.gallery, done=self.done, total=self.total))

    def end(self) -> None:
        """All are."""
        if (seconds := time.monotonic() - self._began) > TOLD_SECONDS:
            logger.info(Event("gallery_loaded", gallery=self.gallery, items=self.done, seconds=round(seconds, 1)))
