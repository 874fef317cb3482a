"""The change feed, sorted: which vectors go where, which items leave, and which cannot be placed, and why.

Shapes: N items, D the dimension of their version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from index.metadata import Item
from index.search_result import Missing
from index.space import Vectors
from service.registry.registry import Registry
from service.store.repository import FeedRow
from service.store.vector_codec import from_bytes, is_whole

MISSING = "the database holds no embedding of these items"
DAMAGED = "the embeddings of these items in the database are damaged: `regraft doctor` names them"

Blocks = Iterable[Sequence[FeedRow]]
"""What `service.store.repository.changes` gives."""


@dataclass
class Sorted:
    """Changes as `Gallery.apply` takes them.

    Attributes:
        placed: (version, origin) -> keys and vectors (N, D).
        removed: keys that leave every shard; those in `missing` are among them.
        items: key -> what is known of each placed item.
        missing: key -> its version, and why it cannot be placed.
    """

    placed: dict[tuple[str, str], tuple[Sequence[int], Vectors]] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)
    items: dict[int, Item] = field(default_factory=dict)
    missing: dict[int, Missing] = field(default_factory=dict)

    def miss(self, keys: Iterable[int], version: str, why: str) -> None:
        """Leave items out."""
        for key in keys:
            self.removed.append(key)
            self.missing[key] = Missing(version, why, self.items.pop(key).seq)


def sort(registry: Registry, blocks: Blocks) -> Sorted:
    """Say of each changed item where it goes."""
    made = Sorted()
    found: dict[tuple[int, str], tuple[list[int], list[bytes]]] = defaultdict(lambda: ([], []))
    for key, version_id, origin, vector, metadata, external_id, seq in (row for block in blocks for row in block):
        if version_id is None:
            made.removed.append(key)
            continue
        made.items[key] = Item(metadata, external_id, seq)
        if vector is None or origin is None:
            made.miss([key], registry.by_id(version_id).name, MISSING)
        else:
            keys, rows = found[version_id, origin]
            keys.append(key)
            rows.append(vector)
    for (version_id, origin), (keys, rows) in found.items():
        version = registry.by_id(version_id)
        kept, vectors, damaged = usable(keys, rows, version.card.dim)
        made.miss(damaged, version.name, DAMAGED)
        if kept:
            made.placed[version.name, origin] = kept, vectors
    return made


def usable(keys: Sequence[int], rows: Sequence[bytes], dim: int) -> tuple[list[int], Vectors, list[int]]:
    """The stored vectors that something can be compared with: of `dim` numbers, all of them finite.

    Returns:
        Their keys, they themselves (N, dim), and the keys of the others.
    """
    whole = {key: row for key, row in zip(keys, rows, strict=True) if is_whole(row, dim)}
    vectors = from_bytes(list(whole.values()), dim)
    finite = np.asarray(np.isfinite(vectors).all(axis=1))
    kept = [key for key, good in zip(whole, finite, strict=True) if good]
    if len(kept) == len(keys):
        return kept, vectors, []
    return kept, vectors[finite], sorted(set(keys) - set(kept))
