"""`Job`: merge and index segments, concurrently with queries and writes.

Shape suffixes: Q queries, D dimension, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from index.engines.config import IndexConfig
from index.engines.memory.segment import Segment, merge_segments
from index.engines.memory.snapshot import SegmentFiles, remove
from index.scan import Mask
from index.space import Vectors

MIN_RECENT_QUERIES = 64
"""Number of distinct recent queries needed to measure an index with them."""
SCANNED, KEPT = "every item is compared", "segments stay apart"
"""The consequences, in the log, of an index that misses the recall aim."""


@dataclass
class Job:
    """Replaces segments by one with an index; `run` takes seconds to minutes and does not touch what is searched."""

    replaced: tuple[Segment, ...]
    alive_at_start: tuple[Mask, ...]
    """The rows of each segment that were alive when the job began; these are merged, even if deleted since."""
    config: IndexConfig
    recent_queries: Sequence[Vectors]
    """Recent queries (D,), oldest first."""
    files: SegmentFiles | None
    accept_first: bool = False
    """Whether to take the first index that reaches the recall aim, for now."""
    made: Segment = field(init=False)
    merge_rejected: bool = field(default=False, init=False)
    """Whether the segments are kept, because one index over all misses the recall aim or is slower to search."""

    def run(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Merge the alive rows, index them and write the files; False if stopped: then there is nothing to swap in."""
        self.made = made = merge_segments(self.replaced, self.alive_at_start)
        if not made.keys_R.size:
            return True
        kept = len(self.replaced) > 1 and any(one.tuned for one in self.replaced)
        missed = KEPT if kept else SCANNED
        if not made.build_index(self.config, self.sample(), stopped, missed=missed, accept_first=self.accept_first):
            return False
        self.merge_rejected = kept and (
            made.tuned is None or made.cost() > sum(one.cost(made) for one in self.replaced)
        )
        if self.merge_rejected:
            if self.files is not None:
                self.files.mark_merge_rejected(self.replaced)
            return True
        made.reorder()
        self.made = made if self.files is None else self.files.keep(made)
        return True

    def sample(self) -> Vectors | None:
        """The distinct recent queries, to measure an index with; None: too few."""
        if len(self.recent_queries) < MIN_RECENT_QUERIES:
            return None
        queries_QD: Vectors = np.unique(np.stack(self.recent_queries), axis=0)
        return queries_QD if len(queries_QD) >= MIN_RECENT_QUERIES else None

    def remove_replaced(self) -> None:
        """Remove the files of the replaced segments; after `finish`."""
        for segment in () if self.merge_rejected else self.replaced:
            remove(segment)
