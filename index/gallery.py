"""QUERY PATH: plan, transform, scan, calibrate, merge, over every serving shard of one gallery. Read `Gallery.answer`.

A gallery holds versions, edges, shards and the metadata of items; it has no images and no SQL. `answer` reads one
consistent view: an item that moves between shards (a backfill, a rollback) is found exactly once, with the metadata it
had when its vector was compared.

There is one shard per version and origin, because scores of items transformed by a forward edge are not comparable with
scores of encoded ones; `index/shards.py` decides which embedding serves an item. Shape suffixes: N items, Q queries,
K results wanted, D dimension.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from index.contents import Contents, from_slots
from index.engines.base import Keys
from index.engines.config import IndexConfig
from index.engines.remote.answers import Answers, Unanswered
from index.engines.remote.base import OpenCollection, no_engine
from index.lock import ReadWriteLock
from index.metadata.filter import Filter
from index.metadata.metadata import Item, Metadata
from index.query.answering import build_result, embed_queries, prepare_search
from index.query.edge_maps import Maps
from index.query.merge import Mode
from index.query.query_plan import Encode, GalleryQuery
from index.query.scatter import scatter
from index.query.search_params import DEFAULTS
from index.query.search_result import Degraded, Missing, SearchResult
from index.query.topology import Topology
from index.query.view import View
from index.remote_part import RemotePart
from index.retry import GalleryChanged, attempts
from index.scan import Mask
from index.shards import Placed, Shards
from index.space import Vectors
from index.version import Edge, EdgeKey, ShardKey, Version

NO_ITEMS: Mapping[int, Item] = MappingProxyType({})
NONE_MISSING: Mapping[int, Missing] = MappingProxyType({})
AUTO = IndexConfig()
ADOPT_BATCH = 16_384
"""Rows that `adopt_segments` moves in one step, which takes some milliseconds."""


class Gallery:
    """The shards of one gallery, the edges between their versions, and the maps that make their scores comparable."""

    def __init__(
        self, config: IndexConfig = AUTO, folder: Path | None = None, open_collection: OpenCollection = no_engine
    ) -> None:
        """`folder`: keeps the files of sealed segments for the next start; None: in memory only."""
        self._topology = Topology()
        self._shards = Shards(config, folder, open_collection)
        self._metadata = Metadata()
        # Items without a searchable vector, which are in no shard.
        self._missing: dict[int, Missing] = {}
        self._seq = 0
        self._current = ""
        # The state that queries read; every change replaces it.
        self._view = self._make_view()
        self._lock = ReadWriteLock()
        # One writer at a time, from computing a change until it is swapped in under the lock above.
        self._writers = threading.Lock()

    def search(
        self,
        query_version: str | None,
        encode: Encode,
        k: int,
        *,
        encoders: frozenset[str] = frozenset(),
        **options: Any,
    ) -> SearchResult:
        """`answer` one `GalleryQuery`, with retries; `options` are fields of `SearchParams`, not validated."""
        params = DEFAULTS.model_copy(update=options) if options else DEFAULTS
        ask = GalleryQuery(encode, k, params, encoders)
        found: list[SearchResult] = []
        for attempt in attempts():
            with attempt:
                found = self.answer([(query_version, ask)])
        return found[0]

    def answer(self, asks: Sequence[tuple[str | None, GalleryQuery]]) -> list[SearchResult]:
        """Answer each (query version, `GalleryQuery`), all from one view. Version None: the current one.

        Raises:
            GalleryChanged: the gallery changed during the call, see `index.retry`.
            InvalidArgument: the depth is below 1, or an unknown mode.
            NoRoute: no shard can be reached; or, if strict, some shard cannot.
            ModeUnavailable: the shards cannot be merged in this mode.
            EngineUnavailable: a remote engine gives no answer; see `index.query.scatter.scatter`.
        """
        # Encoding is slow and must not block writers: encode for the current routes, then check that they still hold.
        embedded = []
        for version, ask in asks:
            view = self._view
            embedded.append((version, ask, embed_queries(view, version or view.current, ask)))
        filters = [ask.params.filter for _, ask in asks if ask.params.filter is not None]
        answers: Answers | None = None
        while True:
            for where in filters:
                self._make_filterable(where)
            found = []
            try:
                with self._lock.read():
                    if not all(map(self._metadata.filterable, filters)):  # a write brought the first item with a key
                        continue
                    view = self._view
                    for version, ask, vectors in embedded:
                        if ask.stored and any(self._seq_of(key) != seq for key, seq in ask.stored.items()):
                            raise GalleryChanged
                        name = version or view.current
                        query = prepare_search(view, self._metadata, name, ask, vectors)
                        found.append(build_result(view, self._metadata, name, vectors, query, scatter(query, answers)))
            except Unanswered as waiting:  # the engines are asked outside the lock, so that writers go on
                answers = waiting.answers
                answers.ask()
            else:
                return found

    def _make_filterable(self, where: Filter) -> None:
        """Build the columns that a filter tests, in short steps: other queries and writes run in between."""
        while not self._metadata.filterable(where):
            with self._exclusive():
                self._metadata.build_columns(where)

    def declare(self, version: Version) -> None:
        """Add a version; the edges in its folder replace all edges from this version.

        The older versions of its edges must have been added before.

        Raises:
            InvalidVersionFolder: an edge does not fit the two cards.
        """
        transforms = {edge.key: self._topology.opened(edge, version) for edge in version.edges}
        with self._change():
            self._topology = self._topology.declared(version, transforms)

    def add_edge(self, edge: Edge) -> None:
        """Add an edge between two versions of the gallery, or replace the one with its key.

        Raises:
            InvalidVersionFolder: the edge does not fit the two cards.
        """
        transform = self._topology.opened(edge, self._topology.versions[edge.new])
        with self._change():
            self._topology = self._topology.connected((*self._topology.graph.edges, edge), {edge.key: transform})

    def remove_edge(self, key: EdgeKey) -> None:
        """Remove the edge (new, old, kind) and the gallery's own maps of routes with it; unknown keys are ignored."""
        with self._change():
            kept = [edge for edge in self._topology.graph.edges if edge.key != key]
            self._topology = self._topology.connected(kept)

    def apply(
        self,
        placed: Placed,
        removed: Sequence[int] = (),
        items: Mapping[int, Item] = NO_ITEMS,
        missing: Mapping[int, Missing] = NONE_MISSING,
        seq: int | None = None,
        current: str | None = None,
        calibrations: tuple[Maps, Mapping[str, Mode]] | None = None,
        order: Sequence[str] | None = None,
    ) -> None:
        """Apply one change atomically; idempotent.

        Args:
            placed: (version, origin) -> (keys, vectors (N, D)): all embeddings of these items, at most one per version.
            removed: keys of items to remove from every shard.
            items: metadata of items in `placed`; an item that is not in it keeps its metadata, or has none if new.
            missing: those of `removed` that exist but cannot be searched.
            seq: the change feed number of the gallery afterwards; None: unchanged.
            current: the version of queries that name none; None: unchanged.
            calibrations: the maps fitted on data of this gallery, and query version -> the merge mode measured to be
                best here; both replace the earlier ones. Calibrated ranking uses one complete set: these if they
                cover all shards searched, else those of the edges. None: unchanged.
            order: the argument of `set_version_order`; None: unchanged.
        """
        placed_keys = list(dict.fromkeys(chain.from_iterable(keys for keys, _ in placed.values())))
        with self._writers:
            # The slow part does not block queries.
            described = self._metadata.diff(placed_keys, items)
            self._shards.create_missing(placed, self._topology.versions, self._topology.spaces)
            self._shards.reserve(placed)
            if order is not None:
                self._shards.prepare(order, self._metadata.slot_count())
            with self._swap():
                if order is not None:
                    self._shards.set_version_order(order, self._metadata.slot_count())
                self._metadata.apply(described)
                slots = {place: self._metadata.slots_of(keys) for place, (keys, _) in placed.items()}
                self._shards.put(placed, slots, removed)
                self._metadata.remove(removed)
                if self._missing:
                    for key in (*removed, *placed_keys):
                        self._missing.pop(key, None)
                self._missing.update(missing)
                self._seq = self._seq if seq is None else seq
                self._current = self._current if current is None else current
                if calibrations is not None:
                    self._topology = self._topology.calibrated(*calibrations)

    def load(self, items: Contents) -> Keys:
        """Add new items, with their vectors if sealed segments have them.

        Returns the keys (N,) of the other items, whose vectors `apply` must add.
        """
        with self._change(), ThreadPoolExecutor(1, "segments") as thread:
            # Segments are hashed in parallel, which releases the GIL; loading metadata needs it.
            shards = self._shards
            opened = thread.submit(
                shards.create_missing, items.embeddings, self._topology.versions, self._topology.spaces
            )
            slots_N = self._metadata.load(items)
            opened.result()
            sealed_N = self._shards.sealed(items)
            self._shards.load(items.select(sealed_N), slots_N[sealed_N])
        return items.keys_N[~sealed_N]

    def in_memory(self, place: ShardKey, keys_N: Keys) -> tuple[Mask, Vectors]:
        """Which vectors of one shard this process has for these items (N,), and these vectors (M, D), in order."""
        with self._lock.read():
            return self._shards.in_memory(place, keys_N)

    def contents(self) -> tuple[Contents, int] | None:
        """All items, as the argument of `load`, and the feed number; None if any item is missing."""
        with self._lock.read():
            taken = None if self._missing else (self._metadata.contents(), self._shards.copied(), self._seq)
        return taken and (from_slots(*taken[:2]), taken[2])

    def keys(self) -> list[int]:
        """The keys of all items, unordered, including items that cannot be searched."""
        with self._lock.read():
            return [*self._metadata.keys(), *self._missing]

    def unsealed_count(self) -> int:
        """Number of embeddings in no sealed segment; snapshots lack their vectors."""
        with self._lock.read():
            return self._shards.unsealed_count()

    def filterable(self, where: Filter) -> bool:
        """Whether the columns that a filter tests hold every item; the first filter by a key builds its columns."""
        return self._metadata.filterable(where)

    def bytes(self) -> int:
        """Approximate memory in bytes, mapped files included."""
        with self._lock.read():
            return self._shards.bytes() + self._metadata.bytes()

    def set_version_order(self, order: Sequence[str]) -> None:
        """Serve each item by the first of these versions that it has an embedding of; atomic."""
        with self._writers:
            self._shards.prepare(order, self._metadata.slot_count())
            with self._swap():
                self._shards.set_version_order(order, self._metadata.slot_count())

    def moved_by(self, order: Sequence[str]) -> int:
        """Number of items that another version would serve in this order."""
        with self._lock.read():
            return self._shards.moved_by(order, self._metadata.slot_count())

    @property
    def config(self) -> IndexConfig:
        """How its shards are indexed."""
        return self._shards.config

    def configure(self, config: IndexConfig) -> None:
        """Set the index configuration; `build_index` carries it out."""
        if config != self.config:
            with self._change():
                self._shards.configure(config)

    @property
    def remote(self) -> RemotePart:
        """The shards whose rows are in a remote engine or are being moved there."""
        return RemotePart(self._shards, self._lock.read, self._change, self._metadata.seqs)

    def build_index(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Run the next sealing, indexing or merging job, which may take minutes, without blocking queries and writes.

        Returns False if there was no job or it ended early, such as by `stopped`. One caller at a time.
        """
        with self._exclusive():
            next_job = self._shards.next_job()
        if next_job is None or not next_job[1].run(stopped):
            return False
        shard, job = next_job
        with self._writers:
            shard.finish(job)
            with self._swap():  # waits for queries that still read the replaced segments
                pass
        job.remove_replaced()
        return True

    def is_large(self) -> bool:
        """Whether a shard has segments, or enough rows to seal."""
        with self._lock.read():
            return any(shard.is_large() for shard in self._shards.all())

    def adopt_segments(self) -> None:
        """Replace rows of this process by segments that another process built from the same items.

        Only for the caller of `build_index`. Queries run between its short steps; each leaves every item in one place.
        """
        with self._lock.read():
            shards = self._shards.all()
        for shard in shards:
            for segment in shard.load_new_segments():
                with self._change():
                    shard.segments += (segment,)
                for start in range(0, len(segment.keys_R), ADOPT_BATCH):
                    with self._change():
                        shard.adopt(segment, slice(start, start + ADOPT_BATCH))
            if shard.has_abandoned():
                with self._change():
                    shard.drop_abandoned()

    def sweep_files(self) -> None:
        """Remove the files of removed shards; only for the caller of `build_index`."""
        with self._lock.read():
            unused = self._shards.unused_folders()
        for place in unused:
            shutil.rmtree(place, ignore_errors=True)

    def indexed_count(self) -> int:
        """Number of items in an approximate index."""
        with self._lock.read():
            return self._shards.indexed_count()

    @property
    def seq(self) -> int:
        """The change feed number of the gallery's state."""
        return self._seq

    def rows_scanned(self, query_version: str) -> float:
        """`View.rows_scanned`; infinite during a write."""
        return math.inf if self._lock.contended else self._view.rows_scanned(query_version)

    def items_by_version(self, order: Sequence[str] | None = None) -> dict[str, int]:
        """Version -> number of items it serves, above 0; `order`: as if it were set."""
        with self._lock.read():
            if order is None:
                return dict(self._view.items_by_version)
            return self._shards.items_by_version(order, self._metadata.slot_count())

    def needed_encoders(self, query_version: str, encoders: frozenset[str]) -> frozenset[str]:
        """The versions that must embed queries of `query_version` now, if these `encoders` can."""
        return self._view.reach(query_version, encoders).encoders

    def missing(self) -> int:
        """Number of items that exist, but cannot be searched."""
        return len(self._missing)

    def _seq_of(self, key: int) -> int | None:
        """The feed number of an item's last write; None: no such item."""
        return (known := self._metadata.get(key) or self._missing.get(key)) and known.seq

    def _count_missing(self) -> Iterable[Degraded]:
        counted = Counter((one.version, one.reason) for one in self._missing.values())
        # An item without any embedding is counted for the current version.
        return (Degraded(version or self._current, items, why) for (version, why), items in counted.items())

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Block all readers and writers."""
        with self._writers, self._lock.write():
            yield

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Block all readers and writers, then replace the view."""
        with self._writers, self._swap():
            yield

    @contextmanager
    def _swap(self) -> Iterator[None]:
        """`_change` for a caller that already holds the writers' lock."""
        with self._lock.write():
            try:
                yield
            finally:
                self._view = self._make_view()

    def _make_view(self) -> View:
        return View(self._topology, self._shards.serving(), tuple(self._count_missing()), self._current, self._seq)
