"""Unloading: encoders that no gallery of this process needs are forgotten after a while.

A version is needed while it is current, and while queries reach some shard only with its help (`dual`, `slerp`). What
a gate or an ingest uses is in use anyway, and counts as idle only from its last use on. At each look files of versions
that a store did not give, because it did not answer, are asked for again.
"""

from __future__ import annotations

import logging

from index.events import Event
from service.background import Background
from service.registry.registry import Registry
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica

logger = logging.getLogger(__name__)

LOOKS_PER_IDLE = 4
MOST_SECONDS = 30.0
"""The longest pause between two looks."""


class EncoderEvictor(Background):
    """A thread that looks now and then which encoders are needed."""

    def __init__(self, registry: Registry, replica: Replica, idle_seconds: float) -> None:
        super().__init__("evictor")
        self._registry = registry
        self._replica = replica
        self._pause = min(idle_seconds / LOOKS_PER_IDLE, MOST_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            try:
                self._registry.retry_unreached()
                self._registry.drop_idle(needed(self._registry, self._replica.all()))
            except Exception:  # a look that fails unloads nothing; the next one may succeed
                logger.exception(Event("encoders_not_dropped"))


def needed(registry: Registry, lives: list[LoadedGallery]) -> set[str]:
    """Names of the versions that queries of these galleries must be embedded by."""
    names: set[str] = set()
    for live in lives:
        if (current := live.current) is None:
            continue
        names |= registry.needed(current.name, live.gallery.items_by_version())
        names |= {live.rollout.version.name} if live.rollout else set()
    return names
