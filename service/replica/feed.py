"""The change feed, gathered: which vectors items hold, which items leave, and which cannot be placed, and why.

Shapes: N items, D the dimension of their version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import TypeVar

import numpy as np

from index.metadata import Item
from index.search_result import Missing
from index.space import Vectors
from service.registry.registry import LoadedVersion, Registry
from service.store.repository import FeedRow
from service.store.vector_codec import all_whole, from_bytes, is_usable

T = TypeVar("T")

MISSING = "the database holds no embedding of these items"
DAMAGED = "the embeddings of these items in the database are damaged: `regraft doctor` names them"

Usable = tuple[Sequence[int], Vectors, Sequence[int]]
"""Keys and vectors (N, D) that something can be compared with, and the keys of the others."""


@dataclass
class FeedChanges:
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

    def hold(self, held: Iterable[tuple[LoadedVersion, str, Usable]]) -> None:
        """Place items by what they hold of each version and origin, and leave out those that hold nothing usable."""
        damaged: dict[int, str] = {}
        unplaced = set(self.items)
        for version, origin, (kept, vectors, bad) in held:
            damaged.update(dict.fromkeys(bad, version.name))
            if kept:
                self.placed[version.name, origin] = kept, vectors
                unplaced.difference_update(kept)
        self.damaged = len(damaged)
        for key in unplaced:
            self._miss(key, *((damaged[key], DAMAGED) if key in damaged else ("", MISSING)))

    def _miss(self, key: int, version: str, why: str) -> None:
        """Leave an item out."""
        self.removed.append(key)
        self.missing[key] = Missing(version, why, self.items.pop(key).seq)


def ahead(made: Iterator[T]) -> Iterator[T]:
    """The same, each made by a thread while whoever asks works on the one before: the database needs no interpreter."""
    with ThreadPoolExecutor(1, "feed") as thread:
        coming = thread.submit(next, made, None)
        while (one := coming.result()) is not None:
            coming = thread.submit(next, made, None)
            yield one


def gather_changes(registry: Registry, blocks: Iterable[Sequence[FeedRow]]) -> FeedChanges:
    """What blocks of the feed say of each item: what it holds."""
    made = FeedChanges()
    found: dict[tuple[int, str], tuple[list[int], list[bytes]]] = defaultdict(lambda: ([], []))
    for block in blocks:
        # A column at a time: there may be a million rows.
        block_keys, version_ids, origins, blobs, *known, deleted = zip(*block, strict=True)
        made.items.update(zip(block_keys, map(Item, *known), strict=True))
        made.remove(compress(block_keys, deleted))
        places = list(zip(version_ids, origins, strict=True))
        for place in (there := set(places)):
            version_id, origin = place
            if version_id is not None:
                mine = [other == place for other in places] if len(there) > 1 else repeat(True)
                keys, rows = found[version_id, origin]
                keys.extend(compress(block_keys, mine))
                rows.extend(compress(blobs, mine))
    made.hold(
        (version := registry.by_id(version_id), origin, usable(keys, rows, version.card.dim))
        for (version_id, origin), (keys, rows) in sorted(found.items())
    )
    return made


def usable(keys: Sequence[int], rows: Sequence[bytes], dim: int) -> Usable:
    """The stored vectors that something can be compared with: of `dim` numbers, all of them finite."""
    if all_whole(rows, dim) and np.isfinite(vectors := from_bytes(rows, dim)).all():
        return list(keys), vectors, []
    good = [is_usable(row, dim) for row in rows]
    kept = list(compress(keys, good))
    return kept, from_bytes(list(compress(rows, good)), dim), sorted(set(keys) - set(kept))
