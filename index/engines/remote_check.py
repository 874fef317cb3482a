"""Whether a collection answers as memory does: asked before rows that lie here are forgotten for those that lie there.

Shape suffixes: N rows that lie in both places, Q queries, D dimension.
"""

from __future__ import annotations

import numpy as np

from index.engines.base import Keys
from index.engines.remote import Collection
from index.engines.remote_rows import RemoteRows
from index.engines.remote_search import RemoteSearch
from index.engines.segments import SegmentedShard
from index.engines.tuning import AIM_K, hits
from index.scan import Mask

ASKED = 32
"""So many of the rows stand for queries."""
ANY_NUMBER = np.iinfo(np.int64).max


def recall_there(
    here: SegmentedShard, collection: Collection, keys_N: Keys, digests_N: Keys, slots_N: Keys, served_N: Mask
) -> float:
    """The share of the exact ten best of the served rows in memory that the collection finds; 1 where there are none.

    Raises:
        EngineUnavailable: it does not answer.
        GalleryChanged: it was written meanwhile.
    """
    k = min(AIM_K, int(np.count_nonzero(served_N)))
    if not k:
        return 1.0
    rows = RemoteRows()
    rows.add(keys_N, digests_N, np.full(len(keys_N), ANY_NUMBER), slots_N, served_N)
    chosen_Q = np.random.default_rng(0).choice(len(keys_N), min(ASKED, len(keys_N)), replace=False)
    queries_QD = np.ascontiguousarray(here.fetch(keys_N[chosen_Q])[:, : here.dim])
    right = here.search(queries_QD, k, exact=True)
    found = RemoteSearch(collection, rows, here.dim, here.space).search(queries_QD, k, None, exact=False)
    same = hits(right[:2], found[:2], higher_is_better=here.space.higher_is_better)
    return float(same.mean())
