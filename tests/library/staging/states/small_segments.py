"""Constants that make a gallery of a dozen items be sealed, indexed, merged and written like one of millions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from index import gallery
from index.engines.memory import approximate, segment, segments
from service.replica import indexer, snapshots

VALUES: list[tuple[Any, str, Any]] = [
    (segments, "SEAL_ROWS", 3),
    (segments, "LARGEST_SEALED", 4),
    (segments, "MERGE_FACTOR", 2),
    (segments, "FILLED_SECONDS", 0.2),
    (segment, "FEW_LISTS", 0),
    (segment, "MIN_APPROXIMATE", 3),
    (segment, "SCANNED_COST", 1.0),
    (approximate, "NODE_COST", 0),
    (approximate, "LISTED_COST", 0),
    (gallery, "ADOPT_BATCH", 2),
    (snapshots, "GROWING", 0),
    (snapshots, "SETTLED", 0),
]


def make_small(put: Callable[[Any, str, Any], None] = setattr, pause: float = 0.02) -> None:
    """Set them in this process; `pause`: seconds between two steps of the indexer."""
    for owner, name, value in [*VALUES, (indexer, "PAUSE_SECONDS", pause)]:
        put(owner, name, value)
