"""`Shards`: all embeddings of one gallery, and which of them serves each item.

A shard holds all embeddings of its version and origin. Each item is served by the first version in the version order
that it has an embedding of. So a new order moves no vectors: it only sets the `served` bit of each row.

Not thread-safe: the gallery locks. "Beside readers" means that only writers must be locked out.

Shape suffixes: N items, M embeddings of one shard, D dimension, S slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.contents import Contents, SlotsAndDigests
from index.engines.base import Keys
from index.engines.config import IndexConfig
from index.engines.memory.job import Job
from index.engines.memory.segments import SegmentedShard
from index.engines.remote.base import Collection, OpenCollection, metric_of, no_engine
from index.engines.remote.shard import RemoteShard
from index.paths import paths_in
from index.scan import Mask
from index.space import Space, Vectors
from index.version import ShardKey, Version

Placed = Mapping[ShardKey, tuple[Sequence[int], Vectors]]
"""(version, origin) -> keys of items, and their vectors (N, D)."""


class Shards:
    """The shards of one gallery."""

    def __init__(
        self, config: IndexConfig, folder: Path | None = None, open_collection: OpenCollection = no_engine
    ) -> None:
        """`folder`: keeps the files of sealed segments for the next start; None: in memory only."""
        self.config, self._open_remote = config, open_collection
        self._folder = folder
        self._by_key: dict[ShardKey, SegmentedShard] = {}
        # Version -> its position in the version order; other versions come last, by name.
        self._order: Mapping[str, int] = {}
        # Results of `_serving_version` since the last write; a deployment needs them several times.
        self._serving_cache: dict[tuple[str, ...], NDArray[np.unsignedinteger[Any]]] = {}

    def serving(self) -> dict[ShardKey, SegmentedShard]:
        """The shards that serve any item."""
        return {place: shard for place, shard in self._by_key.items() if shard.count()}

    def in_memory(self, place: ShardKey, keys_N: Keys) -> tuple[Mask, Vectors]:
        """Which vectors this process has for these items (N,), and these vectors (M, D), in order."""
        if (shard := self._by_key.get(place)) is None:
            return np.zeros(len(keys_N), np.bool_), np.empty((0, 1), np.float32)
        return shard.in_memory(keys_N)

    def all(self) -> list[SegmentedShard]:
        """All shards."""
        return list(self._by_key.values())

    def create_missing(
        self, places: Iterable[ShardKey], versions: Mapping[str, Version], spaces: Mapping[str, Space]
    ) -> None:
        """Add the shards that do not exist yet, empty, beside readers; `spaces`: by version."""
        created = {}
        for place in places:
            if place not in self._by_key:
                created[place] = self._create(place, versions[place[0]].card.dim, spaces[place[0]])
        self._by_key = {**self._by_key, **created}

    def reserve(self, placed: Placed) -> None:
        """Allocate memory for the rows that `put` will store, beside readers, so that `put` is short."""
        for place, (keys, _) in placed.items():
            self._by_key[place].reserve(len(keys))

    def sealed(self, items: Contents) -> Mask:
        """Whether each item (N,) has embeddings, all in sealed segments; after `create_missing`."""
        held_N, sealed_N = np.zeros(len(items.keys_N), np.bool_), np.ones(len(items.keys_N), np.bool_)
        for place, (items_M, digests_M) in items.embeddings.items():
            held_N[items_M] = True
            keys_M, numbers_M = items.keys_N[items_M], items.seqs_N[items_M]
            sealed_N[items_M] &= self._by_key[place].sealed(keys_M, digests_M, numbers_M)
        return held_N & sealed_N

    def load(self, items: Contents, slots_N: Keys) -> None:
        """Add new items whose embeddings are all `sealed`."""
        self._serving_cache = {}
        taken_N = np.zeros(len(slots_N), np.bool_)
        for place in sorted(items.embeddings, key=lambda place: _rank(self._order, place[0])):
            items_M, digests_M = items.embeddings[place]
            columns = (items.keys_N[items_M], digests_M, items.seqs_N[items_M], slots_N[items_M], ~taken_N[items_M])
            self._by_key[place].revive(*columns)
            taken_N[items_M] = True

    def copied(self) -> dict[ShardKey, list[SlotsAndDigests]]:
        """All embeddings without their vectors: shard -> parts."""
        return {place: shard.slots_and_digests() for place, shard in self._by_key.items()}

    def unsealed_count(self) -> int:
        """Number of embeddings in no sealed segment."""
        return sum(shard.head.row_count() for shard in self._by_key.values())

    def bytes(self) -> int:
        """Bytes of rows and indexes."""
        return sum(shard.bytes() for shard in self._by_key.values())

    def put(self, placed: Placed, slots: Mapping[ShardKey, Keys], removed: Sequence[int]) -> None:
        """Replace all embeddings of some items, and remove those of `removed` items.

        Args:
            placed: at most one embedding per item and version.
            slots: shard -> the slots of its items in `placed` (N,).
            removed: keys.
        """
        if not (placed or removed):
            return
        self._serving_cache = {}
        before = {place for place, shard in self._by_key.items() if shard.row_count()}
        changed = set().union(*(keys for keys, _ in placed.values()))
        for place, shard in self._by_key.items():
            staying = placed[place][0] if place in placed else ()
            leaving = changed.difference(staying) if len(staying) < len(changed) else ()
            shard.delete([*leaving, *removed])
        for place, served_N in self._served(placed).items():
            self._by_key[place].upsert(*placed[place], slots[place], served_N)
        # A shard that lost its last embedding frees its memory.
        emptied = {place for place in before if not self._by_key[place].row_count()}
        self._by_key = {place: shard for place, shard in self._by_key.items() if place not in emptied}

    def prepare(self, order: Sequence[str], slots: int) -> None:
        """Compute what `set_version_order` needs, beside readers."""
        if (ranked := self._version_order(_positions(order))) != self._version_order(self._order):
            self._serving_version(ranked, slots)

    def set_version_order(self, order: Sequence[str], slots: int) -> None:
        """Serve each item by the first of these versions that it has an embedding of; `slots`: S."""
        before, self._order = self._version_order(self._order), _positions(order)
        ranked = self._version_order(self._order)
        if ranked != before:
            first_S = self._serving_version(ranked, slots)
            for (version, _), shard in self._by_key.items():
                shard.serve(first_S == ranked.index(version))

    def moved_by(self, order: Sequence[str], slots: int) -> int:
        """Number of items that another version would serve in this order."""
        before, after = self._version_order(self._order), self._version_order(_positions(order))
        if before == after:
            return 0
        before_S, after_S = self._serving_version(before, slots), self._serving_version(after, slots)
        places = [*enumerate(map(after.index, before)), (len(before), len(after))]
        return slots - sum(int(np.count_nonzero((before_S == was) & (after_S == will))) for was, will in places)

    def items_by_version(self, order: Sequence[str], slots: int) -> dict[str, int]:
        """Version -> number of items it would serve in this order, above 0."""
        ranked = self._version_order(_positions(order))
        first_S = self._serving_version(ranked, slots)
        counted = {version: int(np.count_nonzero(first_S == place)) for place, version in enumerate(ranked)}
        return {version: items for version, items in counted.items() if items}

    def configure(self, config: IndexConfig) -> None:
        """Set the index configuration; shards are replaced by remote ones if the new engine is remote."""
        self.config = config
        for place, shard in self._by_key.items():
            shard.config = config
            if config.kind.is_remote and not isinstance(shard, RemoteShard):
                self._by_key[place] = self._rebuild(place, shard)
        self.drop_emptied()

    def drop_emptied(self) -> None:
        """Rebuild the shards that are leaving a remote collection and have all rows in memory."""
        for place, shard in self._by_key.items():
            if isinstance(shard, RemoteShard) and shard.is_leaving and not shard.remote_rows.row_count():
                self._by_key[place] = self._rebuild(place, shard)

    def remote_shards(self) -> dict[ShardKey, RemoteShard]:
        """The shards whose rows are in remote collections or are being moved there."""
        return {place: shard for place, shard in self._by_key.items() if isinstance(shard, RemoteShard)}

    def next_job(self) -> tuple[SegmentedShard, Job] | None:
        """The next sealing, indexing or merging job; None: there is none."""
        jobs = ((shard, shard.freeze()) for shard in self._by_key.values())
        return next(((shard, job) for shard, job in jobs if job is not None), None)

    def unused_folders(self) -> set[Path]:
        """The folders of shards that no longer exist."""
        if self._folder is None:
            return set()
        used = {self._folder / version / origin for version, origin in self._by_key}
        return set(paths_in(self._folder, "*/*")) - used

    def indexed_count(self) -> int:
        """Number of items in an approximate index."""
        return sum(shard.indexed_count() for shard in self._by_key.values())

    def _create(self, place: ShardKey, dim: int, space: Space) -> SegmentedShard:
        if self.config.kind.is_remote:
            return RemoteShard(dim, space, self.config, self._open_collection(place, dim, space))
        return SegmentedShard(dim, space, self.config, self._folder and self._folder.joinpath(*place))

    def _rebuild(self, place: ShardKey, shard: SegmentedShard) -> SegmentedShard:
        """A new shard for the current configuration, which takes over all rows of `shard`."""
        if self.config.kind.is_remote:
            return RemoteShard.from_shard(shard, self._open_collection(place, shard.dim, shard.space))
        rebuilt = self._create(place, shard.dim, shard.space)
        rebuilt.take_over(shard)
        return rebuilt

    def _open_collection(self, place: ShardKey, dim: int, space: Space) -> Collection:
        return self._open_remote(self.config.kind, place, space.width(dim), metric_of(space))

    def _served(self, placed: Placed) -> dict[ShardKey, Mask]:
        """Which of these embeddings serve (N,), by shard; `placed` has all embeddings of its items."""
        taken: set[int] = set()
        served: dict[ShardKey, Mask] = {}
        for place in sorted(placed, key=lambda place: _rank(self._order, place[0])):
            keys, _ = placed[place]
            served[place] = ~np.fromiter(map(taken.__contains__, keys), np.bool_, len(keys))
            taken.update(keys)
        return served

    def _version_order(self, order: Mapping[str, int]) -> list[str]:
        """The versions of all shards, in this order."""
        return sorted({version for version, _ in self._by_key}, key=partial(_rank, order))

    def _serving_version(self, ranked: Sequence[str], slots: int) -> NDArray[np.unsignedinteger[Any]]:
        """By slot (S,), the position in `ranked` of the version that serves its item; `len(ranked)` for a free slot.

        Cached for the last two orders until the next write.
        """
        if (found := self._serving_cache.get(tuple(ranked))) is None or len(found) != slots:
            found = np.full(slots, len(ranked), np.min_scalar_type(len(ranked)))
            for (version, _), shard in sorted(self._by_key.items(), key=lambda held: -ranked.index(held[0][0])):
                for slots_N in shard.slots():
                    found[slots_N] = ranked.index(version)
            kept = dict([*self._serving_cache.items()][-1:])
            self._serving_cache = {**kept, tuple(ranked): found}
        return found


def _positions(order: Sequence[str]) -> dict[str, int]:
    return {version: place for place, version in enumerate(order)}


def _rank(order: Mapping[str, int], version: str) -> tuple[int, str]:
    return order.get(version, len(order)), version
