"""Gather rows of the change feed into the changes that a gallery applies; see `gather_changes`.

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

from index.metadata.metadata import Item
from index.query.search_result import Missing
from index.space import Vectors
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.store.galleries.change_feed import FeedRow
from service.store.vectors.codec import all_whole, from_bytes, is_usable

T = TypeVar("T")

MISSING = "the database has no embedding of these items"
DAMAGED = "the embeddings of these items in the database are damaged: see `regraft doctor`"

Usable = tuple[Sequence[int], Vectors, Sequence[int]]
"""Keys and vectors (N, D) of usable embeddings, and the keys of damaged ones."""


@dataclass
class FeedChanges:
    """Arguments of `Gallery.apply`.

    Attributes:
        placed: (version, origin) -> keys and vectors (N, D) of all undamaged embeddings.
        removed: keys that leave every shard, including those in `missing`.
        items: key -> each placed item.
        missing: key -> the item's version ("" if it has none), and why it cannot be placed.
        damaged: how many items hold a damaged embedding; if they hold another, that serves them.
    """

    placed: dict[tuple[str, str], tuple[Sequence[int], Vectors]] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)
    items: dict[int, Item] = field(default_factory=dict)
    missing: dict[int, Missing] = field(default_factory=dict)
    damaged: int = 0

    def remove(self, keys: Iterable[int]) -> None:
        """Remove items from every shard."""
        for key in keys:
            self.removed.append(key)
            del self.items[key]

    def place_items(self, by_place: Iterable[tuple[LoadedVersion, str, Usable]]) -> None:
        """Place items by their embeddings of each version and origin; leave out items without a usable one."""
        damaged: dict[int, str] = {}
        unplaced = set(self.items)
        for version, origin, (keys, vectors, damaged_keys) in by_place:
            damaged.update(dict.fromkeys(damaged_keys, version.name))
            if keys:
                self.placed[version.name, origin] = keys, vectors
                unplaced.difference_update(keys)
        self.damaged = len(damaged)
        for key in unplaced:
            self._miss(key, *((damaged[key], DAMAGED) if key in damaged else ("", MISSING)))

    def _miss(self, key: int, version: str, why: str) -> None:
        """Leave an item out, for the reason `why`."""
        self.removed.append(key)
        self.missing[key] = Missing(version, why, self.items.pop(key).seq)


def prefetched(values: Iterator[T]) -> Iterator[T]:
    """The same values, each read on a thread while the caller processes the previous one."""
    with ThreadPoolExecutor(1, "feed") as thread:
        upcoming = thread.submit(next, values, None)
        while (value := upcoming.result()) is not None:
            upcoming = thread.submit(next, values, None)
            yield value


def gather_changes(registry: Registry, blocks: Iterable[Sequence[FeedRow]]) -> FeedChanges:
    """Gather blocks of the feed into changes of items."""
    gathered = FeedChanges()
    columns: dict[tuple[int, str], tuple[list[int], list[bytes]]] = defaultdict(lambda: ([], []))
    for block in blocks:
        # By columns, as there may be a million rows.
        block_keys, version_ids, origins, blobs, *item_columns, deleted = zip(*block, strict=True)
        gathered.items.update(zip(block_keys, map(Item, *item_columns), strict=True))
        gathered.remove(compress(block_keys, deleted))
        places = list(zip(version_ids, origins, strict=True))
        for place in (block_places := set(places)):
            version_id, origin = place
            if version_id is not None:
                at_place = [other == place for other in places] if len(block_places) > 1 else repeat(True)
                keys, rows = columns[version_id, origin]
                keys.extend(compress(block_keys, at_place))
                rows.extend(compress(blobs, at_place))
    gathered.place_items(
        (version := registry.by_id(version_id), origin, usable(keys, rows, version.card.dim))
        for (version_id, origin), (keys, rows) in sorted(columns.items())
    )
    return gathered


def usable(keys: Sequence[int], rows: Sequence[bytes], dim: int) -> Usable:
    """Split stored vectors into usable ones, which have `dim` finite numbers, and damaged ones."""
    if all_whole(rows, dim) and np.isfinite(vectors := from_bytes(rows, dim)).all():
        return list(keys), vectors, []
    good = [is_usable(row, dim) for row in rows]
    finite_keys = list(compress(keys, good))
    return finite_keys, from_bytes(list(compress(rows, good)), dim), sorted(set(keys) - set(finite_keys))
