"""Any order and any number of workers end a backfill in the same state (docs/design.md, invariant 6)."""

from __future__ import annotations

import threading
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("order", "workers", "chunk_size"), [("oldest", 1, 48), ("newest", 2, 5), ("random", 3, 1), ("random", 4, 7)]
)
def test_the_end_is_the_same(site: Any, order: str, workers: int, chunk_size: int) -> None:
    # One of half a second may end while its busy worker computes: another does the items, which the first then skips.
    site.settings = site.settings.model_copy(update={"lease_seconds": 60.0})
    site.start_backfill("h", order="oldest", chunk_size=48)
    site.work()
    number = site.start_backfill("g", order=order, chunk_size=chunk_size)

    threads = [threading.Thread(target=site.work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert site.state("g") == site.state("h")
    row = site.backfill(number)
    assert (row.state, row.total, row.done, row.skipped, row.failed) == ("done", 48, 48, 0, 0)
