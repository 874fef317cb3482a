"""Unload idle encoders that no gallery of this process needs.

A version is needed while it is current, and while queries reach some shard only by its encoder (`dual`, `slerp`).
Gates and ingests count as uses of an encoder. Each check also retries to fetch the files of versions for which the
store did not answer.
"""

from __future__ import annotations

import logging

from index.events import Event
from service.background import Background
from service.registry.registry import Registry
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica

logger = logging.getLogger(__name__)

CHECKS_PER_IDLE = 4
MAX_PAUSE_SECONDS = 30.0
"""The longest pause between two checks."""


class EncoderEvictor(Background):
    """A thread that drops encoders that are not needed."""

    def __init__(self, registry: Registry, replica: Replica, idle_seconds: float) -> None:
        super().__init__("evictor")
        self._registry = registry
        self._replica = replica
        self._pause = min(idle_seconds / CHECKS_PER_IDLE, MAX_PAUSE_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            try:
                self._registry.retry_unreached()
                self._registry.drop_idle(needed(self._registry, self._replica.all()))
            except Exception:  # the next check may succeed
                logger.exception(Event("encoders_not_dropped"))


def needed(registry: Registry, galleries: list[LoadedGallery]) -> set[str]:
    """Names of the versions by which queries of these galleries must be embedded."""
    names: set[str] = set()
    for loaded in galleries:
        if (current := loaded.current) is None:
            continue
        names |= registry.needed(current.name, loaded.gallery.items_by_version())
        if (trial := loaded.trial) is not None:
            names.add(trial.version.name)
    return names
