"""`RecallCheck`: measure the recall of a collection against memory, before its rows are dropped from memory.

Shape suffixes: N rows that are in both, Q queries, D dimension.
"""

from __future__ import annotations

import numpy as np

from index.engines.base import Keys
from index.engines.memory.segments import SegmentedShard
from index.engines.memory.tuning import RECALL_K, found_mask
from index.engines.remote.base import Collection
from index.engines.remote.rows import RemoteRows
from index.engines.remote.search import RemoteSearch
from index.scan import Mask

ASKED = 32
"""Number of rows used as queries."""
ANY_NUMBER = np.iinfo(np.int64).max


class RecallCheck:
    """Exact answers from memory to sample queries, computed under the lock and later compared with the collection's."""

    def __init__(self, here: SegmentedShard, keys_N: Keys, digests_N: Keys, slots_N: Keys, served_N: Mask) -> None:
        """Search memory (`here`), which holds these rows."""
        self._space, self._dim = here.space, here.dim
        self._rows = RemoteRows()
        self._rows.add(keys_N, digests_N, np.full(len(keys_N), ANY_NUMBER), slots_N, served_N)
        self._k = min(RECALL_K, int(np.count_nonzero(served_N)))
        chosen_Q = np.random.default_rng(0).choice(len(keys_N), min(ASKED, len(keys_N)), replace=False)
        self._queries_QD = np.ascontiguousarray(here.fetch(keys_N[chosen_Q])[:, : here.dim])
        self._exact = here.search(self._queries_QD, max(1, self._k), exact=True)

    def recall(self, collection: Collection) -> float:
        """The share of the exact ten best served rows that the collection finds; 1 if there are none.

        Raises:
            EngineUnavailable: the engine does not answer.
            GalleryChanged: the collection was written since.
        """
        if not self._k:
            return 1.0
        search = RemoteSearch(collection, self._rows, self._dim, self._space)
        found = search.search(self._queries_QD, self._k, None, exact=False)
        same = found_mask(self._exact[:2], found[:2], higher_is_better=self._space.higher_is_better)
        return float(same.mean())
