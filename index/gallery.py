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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from index.attempts import GalleryChanged, attempts
from index.calibration import Calibration
from index.edge_maps import Maps, check_calibration, edge_maps, map_key, together, wished_mode
from index.engines.base import Hits, Keys
from index.engines.config import IndexConfig
from index.errors import InvalidArgument, NoRoute
from index.graph import Graph, Route, follow
from index.lock import ReadWriteLock
from index.merge import Mode, choose_mode
from index.metadata import Item, Metadata
from index.query_plan import Ask, EmbeddedQueries, Encode, Plan, ShardKey
from index.search_params import SearchParams
from index.search_result import Degraded, Missing, SearchResult, ShardTrace
from index.shards import Placed, Shards
from index.space import Space, space_from_json
from index.transform import Transform, load_transform
from index.version import Edge, EdgeKey, Version

NO_ITEMS: Mapping[int, Item] = MappingProxyType({})
NONE_MISSING: Mapping[int, Missing] = MappingProxyType({})
AUTO = IndexConfig()
NO_MODES: Mapping[str, Mode] = MappingProxyType({})

P = ParamSpec("P")
T = TypeVar("T")


class Gallery:
    """The shards of one gallery, the edges between their versions, and the maps that make their scores comparable."""

    def __init__(self, config: IndexConfig = AUTO, folder: Path | None = None) -> None:
        """`folder`: where sealed segments are kept for another start; None: in memory only."""
        self._versions: dict[str, Version] = {}
        self._spaces: dict[str, Space] = {}
        self._graph = Graph()
        self._transforms: dict[EdgeKey, Transform] = {}
        self._shards = Shards(config, folder)
        self._metadata = Metadata()
        # Items that are in no shard, because nothing of theirs can be searched.
        self._missing: dict[int, Missing] = {}
        self._seq = 0
        self._current = ""
        self._own_maps: Maps = {}
        self._edge_maps: Maps = {}
        self._modes: Mapping[str, Mode] = {}
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
        ask = Ask(encode, k, SearchParams.model_construct(**options), encoders)
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
        embedded = [self._embed(version, ask) for version, ask in asks]
        found = []
        with self._lock.read():
            for (version, ask), made in zip(asks, embedded, strict=True):
                plan = self._plan(version or self._current, ask, made)
                scanned, seconds = [], []
                for (of, _), shard in plan.live.items():
                    started = time.perf_counter()
                    scanned.append(shard.search(plan.moved[of][0], plan.depth, plan.allowed, exact=ask.params.exact))
                    seconds.append(time.perf_counter() - started)
                found.append(self._merged(plan, made, scanned, seconds))
        return found

    def _embed(self, version: str | None, ask: Ask) -> EmbeddedQueries:
        """The queries by every version that the routes of now need."""
        with self._lock.read():
            asking, items_by_version = version or self._current, self._shards.items_by_version()
            needed = _encoders_of(asking, items_by_version, self._routes(asking, items_by_version, ask.encoders)[0])
        made = EmbeddedQueries()
        for name in needed:
            made.vectors[name], made.seconds[name] = _timed(ask.encode, name)
        return made

    def _plan(self, query_version: str, ask: Ask, embedded: EmbeddedQueries) -> Plan:
        """How to answer by what was embedded, under the lock."""
        if ask.depth < 1:
            raise InvalidArgument(f"k is {ask.depth}, it must be at least 1", pointer="/k")
        items_by_version = self._shards.items_by_version()
        routes, unreachable = self._routes(query_version, items_by_version, ask.encoders)
        degraded = (*unreachable, *self._left_out())
        if any(self._written(key) != seq for key, seq in ask.stored.items()):
            raise GalleryChanged
        if not _encoders_of(query_version, items_by_version, routes) <= set(embedded.vectors):
            raise GalleryChanged
        if degraded and (ask.params.strict or not routes):
            raise NoRoute("; ".join(d.reason for d in degraded), pointer="/version")
        live = {key: shard for key, shard in self._shards.serving().items() if key[0] in routes}
        maps = self._maps_for([map_key(routes[version], origin) for version, origin in live])
        spaces = [self._spaces[version] for version, _ in live]
        mode = choose_mode(ask.params.mode, spaces, maps is not None, self._preferred(query_version, routes, live))
        moved = {version: _timed(follow, route, self._opened, embedded.vectors) for version, route in routes.items()}
        where = ask.params.filter
        allowed, seconds = (None, 0.0) if where is None else _timed(self._metadata.select, where)
        depth = min(ask.depth, sum(items_by_version.values()))
        return Plan(
            query_version, items_by_version, routes, degraded, live, spaces, mode, maps, moved, depth, allowed, seconds
        )

    def _merged(
        self, plan: Plan, embedded: EmbeddedQueries, scanned: Sequence[Hits], seconds: Sequence[float]
    ) -> SearchResult:
        """One ranking of what the shards found, and how it came about."""
        started = time.perf_counter()
        sizes = [shard.count() for shard in plan.live.values()]
        merged = plan.merge([hits[:2] for hits in scanned], sizes, len(next(iter(embedded.vectors.values()))))
        merge_seconds = time.perf_counter() - started
        used = plan.maps if plan.maps is not None and plan.mode is Mode.CALIBRATED else [None] * len(sizes)
        shards = tuple(
            ShardTrace(version, origin, size, plan.routes[version], calibration, plan.moved[version][1], took, hits.how)
            for (version, origin), size, calibration, took, hits in zip(
                plan.live, sizes, used, seconds, scanned, strict=True
            )
        )
        return SearchResult(
            plan.query_version,
            plan.mode,
            **vars(merged),
            shards=shards,
            items=self._items(merged.keys_QK),
            seq=self._seq,
            items_by_version=plan.items_by_version,
            degraded=plan.degraded,
            encode_seconds=embedded.seconds,
            filter_seconds=plan.filter_seconds,
            merge_seconds=merge_seconds,
        )

    def declare(self, version: Version) -> None:
        """Make a version known, with the edges it came with in the place of those that led from it before.

        The versions its edges point to must be known already.

        Raises:
            InvalidVersionFolder: an edge does not fit the two cards.
        """
        transforms = {edge.key: self._open(edge, version) for edge in version.edges}
        with self._lock.write():
            self._versions[version.name] = version
            self._spaces[version.name] = space_from_json(version.card.space)
            self._transforms.update(transforms)
            self._connect((*(e for e in self._graph.edges if e.new != version.name), *version.edges))

    def add_edge(self, edge: Edge) -> None:
        """Make one more edge between two known versions known; it takes the place of one with its key.

        Raises:
            InvalidVersionFolder: it does not fit the two cards.
        """
        transform = self._open(edge, self._versions[edge.new])
        with self._lock.write():
            self._transforms[edge.key] = transform
            self._connect((*self._graph.edges, edge))

    def remove_edge(self, key: EdgeKey) -> None:
        """Forget the edge (new, old, kind) and the gallery's own maps of routes along it; ignores unknown ones."""
        with self._lock.write():
            self._connect(edge for edge in self._graph.edges if edge.key != key)

    def calibrate(self, maps: Maps, modes: Mapping[str, Mode] = NO_MODES) -> None:
        """Set the maps fitted on this gallery's own data, in the place of those it had.

        Calibrated ranking uses one complete set: these where they cover all shards asked, else those of the edges.
        `modes` says for queries of a version which merge mode was measured to be best here.
        """
        with self._lock.write():
            self._own_maps, self._modes = dict(maps), dict(modes)

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
            calibrations: what `calibrate` takes; None: as before.
            order: what `prefer` takes; None: as before.
        """
        dims = {version: self._versions[version].card.dim for version, _ in placed}
        with self._lock.write():
            if order is not None:
                self._shards.prefer(order, self._metadata.slots())
            self._shards.make(placed, dims, self._spaces)
            slots = {place: self._metadata.put(keys, items) for place, (keys, _) in placed.items()}
            self._shards.put(placed, slots, removed)
            self._metadata.drop(removed)
            for key in (*removed, *(key for keys, _ in placed.values() for key in keys)):
                self._missing.pop(key, None)
            self._missing.update(missing)
            self._seq = self._seq if seq is None else seq
            self._current = self._current if current is None else current
            if calibrations is not None:
                self._own_maps, self._modes = dict(calibrations[0]), dict(calibrations[1])

    def prefer(self, order: Sequence[str]) -> None:
        """Serve each item by the first of these versions that it holds an embedding of; in one step, at any size."""
        with self._lock.write():
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
        with self._lock.write():
            shard.finish(job)
        job.clear()
        return True

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
        """Items that a query of a version is compared with; infinite where a route leads on, or somebody writes."""
        shards = self._shards.serving()
        alone = not self._lock.contended and all(version == query_version for version, _ in shards)
        return sum(shard.count() - shard.indexed() for shard in shards.values()) if alone else math.inf

    def items_by_version(self, order: Sequence[str] | None = None) -> dict[str, int]:
        """Items per version that serves them, versions without any left out; `order`: as it would be in this one."""
        with self._lock.read():
            if order is None:
                return self._shards.items_by_version()
            return self._shards.items_in(order, self._metadata.slots())

    def unreachable(self, query_version: str, encoders: frozenset[str]) -> tuple[Degraded, ...]:
        """The items that queries of `query_version` could not reach now."""
        with self._lock.read():
            return self._routes(query_version, self._shards.items_by_version(), encoders)[1]

    def missing(self) -> int:
        """Items that are there, but cannot be searched."""
        return len(self._missing)

    def _written(self, key: int) -> int | None:
        """The feed number of an item's last write, None where there is no such item."""
        known = self._metadata.get(key) or self._missing.get(key)
        return None if known is None else known.seq

    def _items(self, keys_QK: Keys) -> dict[int, Item]:
        """What is known of the items that were found."""
        get = self._metadata.get
        return {key: item for key in set(keys_QK.ravel().tolist()) if (item := get(key)) is not None}

    def _left_out(self) -> Iterable[Degraded]:
        counted = Counter((one.version, one.reason) for one in self._missing.values())
        # What holds nothing at all is missing where it should be embedded.
        return (Degraded(version or self._current, items, why) for (version, why), items in counted.items())

    def _routes(
        self, query_version: str, items_by_version: Mapping[str, int], encoders: frozenset[str]
    ) -> tuple[dict[str, Route], tuple[Degraded, ...]]:
        """The route to each version within reach, and what is out of reach."""
        planned = {version: self._graph.route(query_version, version, encoders) for version in items_by_version}
        degraded = tuple(
            Degraded(version, items_by_version[version], self._graph.unreachable(query_version, version, encoders))
            for version, route in planned.items()
            if route is None
        )
        return {version: route for version, route in planned.items() if route is not None}, degraded

    def _maps_for(self, keys: Sequence[tuple[str, str, str, tuple[EdgeKey, ...]]]) -> list[Calibration] | None:
        """One map for each of the keys, all from one source; None where neither has them all."""
        for maps in (self._own_maps, self._edge_maps):
            if all(key in maps for key in keys):
                return [maps[key] for key in keys]
        return None

    def _preferred(self, query_version: str, routes: Mapping[str, Route], live: Iterable[ShardKey]) -> Mode | None:
        """The merge mode measured on this gallery, else the one that the routes' edges know or the rule gives."""
        measured = self._modes.get(query_version)
        return measured or together(wished_mode(routes[version], origin) for version, origin in live)

    def _opened(self, edge: Edge) -> Transform:
        return self._transforms[edge.key]

    def _open(self, edge: Edge, new: Version) -> Transform:
        old = self._versions[edge.old].card
        check_calibration(edge, new.card, old)
        return load_transform(edge, new.card, old)

    def _connect(self, edges: Iterable[Edge]) -> None:
        """Make these the edges; under the lock. What was made for another edge goes."""
        graph = Graph(edges)
        gone = {edge.key for edge in self._graph.edges if edge not in graph.edges}
        self._graph = graph
        self._transforms = {edge.key: self._transforms[edge.key] for edge in graph.edges}
        self._own_maps = {key: own for key, own in self._own_maps.items() if gone.isdisjoint(key[3])}
        self._modes = {
            version: mode for version, mode in self._modes.items() if version not in {key[0] for key in gone}
        }
        self._edge_maps = edge_maps(graph.edges, self._versions)


def _encoders_of(query_version: str, items_by_version: Mapping[str, int], routes: Mapping[str, Route]) -> set[str]:
    """Who embeds queries for these routes; where there are no items, the one that asks, so that it is a legal query."""
    return {version for route in routes.values() for version in route.encoders} if items_by_version else {query_version}


def _timed(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """What it gives, and the seconds it took."""
    started = time.perf_counter()
    return work(*args, **kwargs), time.perf_counter() - started
