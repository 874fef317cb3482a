"""The change feed, sorted: which vectors items hold, which items leave, and which cannot be placed, and why.

Shapes: N items, D the dimension of their version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from index.metadata import Item
from index.search_result import Missing
from index.space import Vectors
from service.registry.registry import Registry
from service.store.repository import FeedRow
from service.store.vector_codec import all_whole, from_bytes, is_whole

MISSING = "the database holds no embedding of these items"
DAMAGED = "the embeddings of these items in the database are damaged: `regraft doctor` names them"

Blocks = Iterable[Sequence[FeedRow]]
"""What `service.store.repository.changes` gives."""


@dataclass
class Sorted:
    """Changes as `Gallery.apply` takes them.

    Attributes:
        placed: (version, origin) -> keys and vectors (N, D): all that an item holds, but for what is damaged.
        removed: keys that leave every shard; those in `missing` are among them.
        items: key -> what is known of each placed item.
        missing: key -> its version, "" where it has none, and why it cannot be placed.
        damaged: items that hold a damaged embedding; those that hold another are served by that.
    """

    placed: dict[tuple[str, str], tuple[Sequence[int], Vectors]] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)
    items: dict[int, Item] = field(default_factory=dict)
    missing: dict[int, Missing] = field(default_factory=dict)
    damaged: int = 0

    def remove(self, keys: Iterable[int]) -> None:
        """Have items leave every shard."""
        for key in keys:
            self.removed.append(key)
            del self.items[key]

    def miss(self, key: int, version: str, why: str) -> None:
        """Leave an item out."""
        self.removed.append(key)
        self.missing[key] = Missing(version, why, self.items.pop(key).seq)


def sort(registry: Registry, blocks: Blocks) -> Sorted:
    """Say of each changed item what it holds."""
    made = Sorted()
    found: dict[tuple[int, str], tuple[list[int], list[bytes]]] = defaultdict(lambda: ([], []))
    for block in blocks:
        # A column at a time: there may be a million rows.
        block_keys, version_ids, origins, blobs, *known, deleted = zip(*block, strict=True)
        made.items.update(zip(block_keys, map(Item, *known), strict=True))
        made.remove(compress(block_keys, deleted))
        places = list(zip(version_ids, origins, strict=True))
        for place in set(places):
            version_id, origin = place
            if version_id is not None:
                mine = [other == place for other in places]
                keys, rows = found[version_id, origin]
                keys.extend(compress(block_keys, mine))
                rows.extend(compress(blobs, mine))
    damaged: dict[int, str] = {}
    for (version_id, origin), (keys, rows) in sorted(found.items()):
        version = registry.by_id(version_id)
        kept, vectors, bad = usable(keys, rows, version.card.dim)
        damaged.update(dict.fromkeys(bad, version.name))
        if kept:
            made.placed[version.name, origin] = kept, vectors
    made.damaged = len(damaged)
    for key in made.items.keys() - {key for kept, _ in made.placed.values() for key in kept}:
        made.miss(key, *((damaged[key], DAMAGED) if key in damaged else ("", MISSING)))
    return made


def usable(keys: Sequence[int], rows: Sequence[bytes], dim: int) -> tuple[list[int], Vectors, list[int]]:
    """The stored vectors that something can be compared with: of `dim` numbers, all of them finite.

    Returns:
        Their keys, they themselves (N, dim), and the keys of the others.
    """
    whole = keys
    if not all_whole(rows, dim):
        whole = [key for key, row in zip(keys, rows, strict=True) if is_whole(row, dim)]
        rows = [row for row in rows if is_whole(row, dim)]
    vectors = from_bytes(rows, dim)
    finite = np.asarray(np.isfinite(vectors).all(axis=1))
    if len(whole) == len(keys) and finite.all():
        return list(keys), vectors, []
    kept = list(compress(whole, finite))
    return kept, vectors[finite], sorted(set(keys) - set(kept))
