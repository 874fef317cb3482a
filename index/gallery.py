"""QUERY PATH: plan, transform, scan, calibrate, merge - over every live shard of one gallery.

A gallery knows versions, edges, shards and what is shown of an item; it knows no images and no SQL. `answer` answers
from one consistent view: an item that moves between shards (a backfill, a rollback) is found exactly once, and is shown
as it was when its vector was compared.

There is one shard for each version and origin, because the score of an item that a forward edge moved does not mean
what the score of an encoded one means; `index/shards.py` says which of its embeddings serves an item. Shape suffixes:
Q queries, K results wanted, D dimension.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from index.attempts import GalleryChanged, attempts
from index.contents import Contents, of_slots
from index.edge_maps import Maps
from index.engines.base import Keys
from index.engines.config import IndexConfig
from index.errors import InvalidArgument, NoRoute
from index.graph import follow
from index.lock import ReadWriteLock
from index.merge import Mode
from index.metadata import Item, Metadata
from index.query_plan import Ask, EmbeddedQueries, Encode, Plan
from index.scatter import Gathered, ShardQuery, scatter
from index.search_params import DEFAULTS
from index.search_result import Degraded, Missing, SearchResult
from index.shards import Placed, Shards
from index.topology import Topology
from index.version import Edge, EdgeKey, Version
from index.view import View

NO_ITEMS: Mapping[int, Item] = MappingProxyType({})
NONE_MISSING: Mapping[int, Missing] = MappingProxyType({})
AUTO = IndexConfig()
ADOPTED_ROWS = 16_384
"""So many rows are compared in one step, in some milliseconds."""

P = ParamSpec("P")
T = TypeVar("T")


class Gallery:
    """The shards of one gallery, the edges between their versions, and the maps that make their scores comparable."""

    def __init__(self, config: IndexConfig = AUTO, folder: Path | None = None) -> None:
        """`folder`: where sealed segments are kept for another start; None: in memory only."""
        self._topology = Topology()
        self._shards = Shards(config, folder)
        self._metadata = Metadata()
        # Items that are in no shard, because nothing of theirs can be searched.
        self._missing: dict[int, Missing] = {}
        self._seq = 0
        self._current = ""
        # None once something changed: the next query makes it anew.
        self._view: View | None = None
        self._lock = ReadWriteLock()

    def search(
        self,
        query_version: str | None,
        encode: Encode,
        k: int,
        *,
        encoders: frozenset[str] = frozenset(),
        **options: Any,
    ) -> SearchResult:
        """`answer` to one `Ask`, as often as it takes; the other options are fields of `SearchParams`, not checked."""
        params = DEFAULTS.model_copy(update=options) if options else DEFAULTS
        ask = Ask(encode, k, params, encoders)
        found: list[SearchResult] = []
        for attempt in attempts():
            with attempt:
                found = self.answer([(query_version, ask)])
        return found[0]

    def answer(self, asks: Sequence[tuple[str | None, Ask]]) -> list[SearchResult]:
        """Rank every item that the queries of each `Ask` can reach, as embedded by its version; all from one view.

        Version None: the current one, of which there must be one.

        Raises:
            GalleryChanged: the gallery did not stand still meanwhile, see `index.attempts`.
            InvalidArgument: the depth is below 1, or there is no such mode.
            NoRoute: strict, and a shard cannot be reached; or none can.
            ModeUnavailable: the shards cannot be merged in this mode.
        """
        # Encoding is slow and must not hold up writers: encode for the routes of now, then see if they still hold.
        embedded = []
        for version, ask in asks:
            embedded.append(self._embed(version, ask))
            if ask.params.filter is not None:
                self._make_filterable()
        found = []
        with self._lock.read():
            view = self._now()
            for (version, ask), made in zip(asks, embedded, strict=True):
                query = self._prepared(view, version or view.current, ask, made)
                found.append(self._result(view, version or view.current, made, query, scatter(query)))
        return found

    def _embed(self, version: str | None, ask: Ask) -> EmbeddedQueries:
        """The queries by every version that the routes of now need."""
        if (view := self._view) is None:
            with self._lock.read():
                view = self._now()
        needed = view.reach(version or view.current, ask.encoders).encoders
        made = EmbeddedQueries()
        for name in needed:
            made.vectors[name], made.seconds[name] = _timed(ask.encode, name)
        return made

    def _make_filterable(self) -> None:
        """Have filters find every item: at the first one in steps, between which others query and write."""
        while not self._metadata.filterable:
            with self._lock.write():
                self._metadata.enter()

    def _prepared(self, view: View, query_version: str, ask: Ask, embedded: EmbeddedQueries) -> ShardQuery:
        """What is asked of the shards, under the lock: plan, transform, filter."""
        plan, degraded = self._planned(view, query_version, ask, embedded)
        transform, where = view.topology.transform, ask.params.filter
        moved = {version: _timed(follow, route, transform, embedded.vectors) for version, route in plan.routes.items()}
        allowed, seconds = (None, 0.0) if where is None else _timed(self._metadata.select, where)
        depth, queries = min(ask.depth, view.items), len(next(iter(embedded.vectors.values())))
        return ShardQuery(plan, moved, queries, depth, allowed, ask.params.exact, degraded, seconds)

    def _result(
        self, view: View, query_version: str, embedded: EmbeddedQueries, query: ShardQuery, found: Gathered
    ) -> SearchResult:
        """What was found, and what its items are, under the lock."""
        merged = found.merged
        keys_QK, items = self._metadata.found(merged.keys_QK)
        return SearchResult(
            query_version,
            query.plan.mode,
            merged.scores_QK,
            merged.raw_QK,
            keys_QK,
            merged.shards_QK,
            found.shards,
            items,
            view.seq,
            view.items_by_version,
            query.degraded,
            encode_seconds=embedded.seconds,
            filter_seconds=query.filter_seconds,
            merge_seconds=found.merge_seconds,
        )

    def _planned(
        self, view: View, query_version: str, ask: Ask, embedded: EmbeddedQueries
    ) -> tuple[Plan, tuple[Degraded, ...]]:
        """How to answer, and what is left out, if that may be and what was embedded serves."""
        if ask.depth < 1:
            raise InvalidArgument(f"k is {ask.depth}, it must be at least 1", pointer="/k")
        reach = view.reach(query_version, ask.encoders)
        if ask.stored and any(self._written(key) != seq for key, seq in ask.stored.items()):
            raise GalleryChanged
        if not reach.encoders <= embedded.vectors.keys():
            raise GalleryChanged
        if reach.degraded and (ask.params.strict or not reach.routes):
            raise NoRoute("; ".join(d.reason for d in reach.degraded), pointer="/version")
        return view.plan(query_version, ask.encoders, ask.params.mode), reach.degraded

    def _now(self) -> View:
        """What is served, under the lock."""
        if (view := self._view) is None:
            left_out = tuple(self._left_out())
            view = self._view = View(self._topology, self._shards.serving(), left_out, self._current, self._seq)
        return view

    def declare(self, version: Version) -> None:
        """Make a version known, with the edges it came with in the place of those that led from it before.

        The versions its edges point to must be known already.

        Raises:
            InvalidVersionFolder: an edge does not fit the two cards.
        """
        transforms = {edge.key: self._topology.opened(edge, version) for edge in version.edges}
        with self._change():
            self._topology = self._topology.declared(version, transforms)

    def add_edge(self, edge: Edge) -> None:
        """Make one more edge between two known versions known; it takes the place of one with its key.

        Raises:
            InvalidVersionFolder: it does not fit the two cards.
        """
        transform = self._topology.opened(edge, self._topology.versions[edge.new])
        with self._change():
            self._topology = self._topology.connected((*self._topology.graph.edges, edge), {edge.key: transform})

    def remove_edge(self, key: EdgeKey) -> None:
        """Forget the edge (new, old, kind) and the gallery's own maps of routes along it; ignores unknown ones."""
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
        """Take in what items hold now, in one step that no query sees half done; applying it twice is harmless.

        Args:
            placed: (version, origin) -> (keys, vectors (N, D)): all that these items hold, at most one by a version.
            removed: keys that leave every shard.
            items: what is known of items in `placed`; one left out keeps what it had, at first nothing.
            missing: those of `removed` that are there, but cannot be searched.
            seq: the number in the change feed that the gallery stands at afterwards; None: as before.
            current: the version that queries which name none are asked by from then on; None: as before.
            calibrations: the maps fitted on this gallery's own data, and for queries of a version the merge mode that
                was measured to be best here; in the place of those it had. Calibrated ranking uses one complete set:
                these where they cover all shards asked, else those of the edges. None: as before.
            order: what `prefer` takes; None: as before.
        """
        with self._change():
            if order is not None:
                self._shards.prefer(order, self._metadata.slots())
            self._shards.make(placed, self._topology.versions, self._topology.spaces)
            slots = {place: self._metadata.put(keys, items) for place, (keys, _) in placed.items()}
            self._shards.put(placed, slots, removed)
            self._metadata.drop(removed)
            for key in (*removed, *(key for keys, _ in placed.values() for key in keys)):
                self._missing.pop(key, None)
            self._missing.update(missing)
            self._seq = self._seq if seq is None else seq
            self._current = self._current if current is None else current
            if calibrations is not None:
                self._topology = self._topology.calibrated(*calibrations)

    def load(self, items: Contents) -> Keys:
        """Take in items that are not there yet and whose vectors sealed segments hold; gives the keys of the others."""
        with self._change():
            self._shards.make(items.held, self._topology.versions, self._topology.spaces)
            sealed_N = self._shards.sealed(items)
            self._shards.load(mine := items.only(sealed_N), self._metadata.load(mine))
        return items.keys_N[~sealed_N]

    def contents(self) -> tuple[Contents, int] | None:
        """What `load` takes of all there is, and the feed number; None while items are left out."""
        with self._lock.read():
            taken = None if self._missing else (self._metadata.copied(), self._shards.copied(), self._seq)
        return taken and (of_slots(*taken[:2]), taken[2])

    @property
    def filterable(self) -> bool:
        """Whether filters find every item already; the first one has to make it so."""
        return self._metadata.filterable

    def bytes(self) -> int:
        """Roughly what it takes of memory, files that are mapped into it among them."""
        with self._lock.read():
            return self._shards.bytes() + self._metadata.bytes()

    def prefer(self, order: Sequence[str]) -> None:
        """Serve each item by the first of these versions that it holds an embedding of; in one step, at any size."""
        with self._change():
            self._shards.prefer(order, self._metadata.slots())

    def moving(self, order: Sequence[str]) -> int:
        """Items that another version would serve in this order."""
        with self._lock.read():
            return self._shards.moving(order, self._metadata.slots())

    @property
    def config(self) -> IndexConfig:
        """How it is indexed."""
        return self._shards.config

    def configure(self, config: IndexConfig) -> None:
        """Have shards indexed so from now on; `build_index` takes it up."""
        if config == self.config:
            return
        with self._lock.write():
            self._shards.configure(config)

    def build_index(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Seal, index or merge the rows of one shard where that is due, beside queries and writes; False: nothing was.

        It may take minutes; once `stopped` it gives up. One caller at a time.
        """
        with self._lock.write():
            due = self._shards.due()
        if due is None or not due[1].run(stopped):
            return False
        shard, job = due
        with self._change():
            shard.finish(job)
        job.clear()
        return True

    def is_large(self) -> bool:
        """Whether there is something to seal, or was."""
        with self._lock.read():
            return any(shard.is_large() for shard in self._shards.all())

    def adopt_segments(self) -> None:
        """Search by what another process has built of the same items, in the place of rows here; beside queries.

        By the caller of `build_index`. Each step is short, and leaves every item in one place.
        """
        with self._lock.read():
            shards = self._shards.all()
        for shard in shards:
            for made in shard.unseen():
                with self._change():
                    shard.segments += (made,)
                for start in range(0, len(made.keys_R), ADOPTED_ROWS):
                    with self._change():
                        shard.adopt(made, slice(start, start + ADOPTED_ROWS))
            if shard.has_left():
                with self._change():
                    shard.drop_left()

    def sweep_files(self) -> None:
        """Remove the files of shards that there are not; by the caller of `build_index`."""
        with self._lock.read():
            unused = self._shards.unused_files()
        for place in unused:
            shutil.rmtree(place, ignore_errors=True)

    def indexed(self) -> int:
        """Items that an approximate index answers for."""
        with self._lock.read():
            return self._shards.indexed()

    @property
    def seq(self) -> int:
        """The number in the change feed that everything here was true at."""
        return self._seq

    def rows_scanned(self, query_version: str) -> float:
        """Items that a query of a version is compared with; infinite where a route leads on, or after a write."""
        view = self._view
        return math.inf if view is None or self._lock.contended else view.rows_scanned(query_version)

    def items_by_version(self, order: Sequence[str] | None = None) -> dict[str, int]:
        """Items per version that serves them, versions without any left out; `order`: as it would be in this one."""
        with self._lock.read():
            if order is None:
                return dict(self._now().items_by_version)
            return self._shards.items_in(order, self._metadata.slots())

    def unreachable(self, query_version: str, encoders: frozenset[str]) -> tuple[Degraded, ...]:
        """The items that queries of `query_version` could not reach now."""
        with self._lock.read():
            view = self._now()
            return self._topology.routes(query_version, view.items_by_version, encoders)[1]

    def missing(self) -> int:
        """Items that are there, but cannot be searched."""
        return len(self._missing)

    def _written(self, key: int) -> int | None:
        """The feed number of an item's last write, None where there is no such item."""
        known = self._metadata.get(key) or self._missing.get(key)
        return None if known is None else known.seq

    def _left_out(self) -> Iterable[Degraded]:
        counted = Counter((one.version, one.reason) for one in self._missing.values())
        # What holds nothing at all is missing where it should be embedded.
        return (Degraded(version or self._current, items, why) for (version, why), items in counted.items())

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Something about what is served changes, alone under the lock."""
        with self._lock.write():
            self._view = None
            yield


def _timed(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """What it gives, and the seconds it took."""
    started = time.perf_counter()
    return work(*args, **kwargs), time.perf_counter() - started
