"""A real service that moves any two vectors at once, without waiting, and takes its time over each step: `PORT`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from service.http import app
from service.settings import Settings
from service.store.database.migration import upgrade
from service.store.image_store.blobs import Blobs
from service.store.offloading import moves, offloader

STEP_SECONDS = 0.02
"""So that who kills it finds it in the middle."""
STEPS: list[tuple[Any, str]] = [
    (Blobs, "put"),
    (moves, "begin_file"),
    (moves, "_put_locations"),
    (moves, "_put_vectors"),
    (moves, "drop_file"),
    (moves, "forget_file"),
]


def slow(call: Callable[..., Any]) -> Callable[..., Any]:
    def slowed(*args: Any, **options: Any) -> Any:
        time.sleep(STEP_SECONDS)
        result = call(*args, **options)
        time.sleep(STEP_SECONDS)
        return result

    return slowed


if __name__ == "__main__":
    offloader.FILE_ROWS, offloader.LEAST_ROWS, moves.BLOCK = 6, 2, 2
    offloader.SETTLED_SECONDS = offloader.COUNTED_SECONDS = 0.0
    offloader.PAUSE_SECONDS, offloader.LEASE_SECONDS, moves.GRACE_SECONDS = 0.05, 0.4, 20.0
    for owner, name in STEPS:
        setattr(owner, name, slow(getattr(owner, name)))
    settings = Settings(port=int(sys.argv[1]))
    upgrade(settings)
    app.serve(settings)
