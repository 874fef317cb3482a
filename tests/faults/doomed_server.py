"""A real service that kills itself, without a chance to clean up, at the n-th pass of one point: `PORT POINT N`."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from index import contents
from index.engines.memory import segment, segments
from index.gallery import Gallery
from service.http import app
from service.http.upgrades import deployments, versions
from service.items import by_filter, deletion
from service.replica import indexer, snapshots
from service.replica.cache import Cache
from service.settings import Settings
from service.store.database.migration import upgrade
from service.upgrades import gallery_removal, removal, tombstones
from service.upgrades.deployments import reaper
from service.upgrades.deployments.transition import TransitionContext
from service.upgrades.edges import changes
from service.upgrades.trials import monitor as watching

POINTS: dict[str, list[tuple[Any, str, bool]]] = {
    # point: (where, which function, at its end instead of its beginning); every name it is called by
    "stepped": [(TransitionContext, "enter", True)],
    "committed": [(deployments, "_answer", False)],
    "retired": [(reaper, "free", False)],
    "freeing": [(reaper, "_free_block", True)],
    "deleting": [(gallery_removal, "_free_block", True)],
    "rolled_back": [(watching, "roll_back", True)],
    "none": [],
    "writing": [(contents, "sync_all", False)],
    "written": [(contents, "write", True)],
    "noted": [(snapshots, "record_snapshot", True)],
    "sweeping": [(snapshots, "_age", False)],
    "loading": [(Gallery, "load", True)],
    "unloading": [(Cache, "make_room", True)],
    "purging": [(tombstones, "_purge_block", True)],
    "removing": [(deletion, "_delete", True)],
    "removed": [(by_filter, "_change_block", True)],
    "registering": [(versions, "sync_all", True)],
    "unregistering": [(removal, "sync_all", True)],
    "connecting": [(changes, "sync_all", True)],
}
SMALL = ("none", "writing", "written", "noted", "sweeping", "loading", "unloading")
"""Points of a service that seals a few items, and writes them down at once."""


def doom(call: Callable[..., Any], at_end: bool, number: int, calls: Any) -> Callable[..., Any]:
    def doomed(*args: Any, **options: Any) -> Any:
        due = next(calls) == number
        if due and not at_end:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **options)
        if due and at_end:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return doomed


if __name__ == "__main__":
    port, point, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    reaper.BLOCK = gallery_removal.BLOCK = by_filter.BLOCK = tombstones.BLOCK = 10
    memory = {}
    if point in SMALL:
        segments.SEAL_ROWS = segment.MIN_APPROXIMATE = 10
        segment.SCANNED_COST = 1.0
        indexer.PAUSE_SECONDS, snapshots.GROWING, snapshots.SETTLED = 0.02, 0, 0
        memory = {"memory": 1} if point == "unloading" else {}
    if point == "purging":
        tombstones.LOOK_SECONDS = 0.05
    counter = itertools.count(1)
    for where, name, at_end in POINTS[point]:
        setattr(where, name, doom(getattr(where, name), at_end, number, counter))
    settings = Settings(port=port, **memory)
    upgrade(settings)
    app.serve(settings)
