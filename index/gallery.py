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
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from index.answering import embed, prepared, result
from index.contents import Contents, of_slots
from index.edge_maps import Maps
from index.engines.base import Keys
from index.engines.config import IndexConfig
from index.engines.remote import Elsewhere, nowhere
from index.engines.remote_answers import Answers, Unanswered
from index.filter import Filter
from index.lock import ReadWriteLock
from index.merge import Mode
from index.metadata import Item, Metadata
from index.query_plan import Ask, Encode, ShardKey
from index.remote_part import RemotePart
from index.retry import GalleryChanged, attempts
from index.scan import Mask
from index.scatter import scatter
from index.search_params import DEFAULTS
from index.search_result import Degraded, Missing, SearchResult
from index.shards import Placed, Shards
from index.space import Vectors
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

    def __init__(self, config: IndexConfig = AUTO, folder: Path | None = None, elsewhere: Elsewhere = nowhere) -> None:
        """`folder`: where sealed segments are kept for another start; None: in memory only."""
        self._topology = Topology()
        self._shards = Shards(config, folder, elsewhere)
        self._metadata = Metadata()
        # Items that are in no shard, because nothing of theirs can be searched.
        self._missing: dict[int, Missing] = {}
        self._seq = 0
        self._current = ""
        # Of what is served now: whoever changes something makes it anew.
        self._view = self._seen()
        self._lock = ReadWriteLock()
        # Held by whoever changes something, from where it is worked out until it is swapped in under the lock above.
        self._changing = threading.Lock()

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
            GalleryChanged: the gallery did not stand still meanwhile, see `index.retry`.
            InvalidArgument: the depth is below 1, or there is no such mode.
            NoRoute: strict, and a shard cannot be reached; or none can.
            ModeUnavailable: the shards cannot be merged in this mode.
        """
        # Encoding is slow and must not hold up writers: encode for the routes of now, then see if they still hold.
        embedded = []
        for version, ask in asks:
            view = self._view
            embedded.append((version, ask, embed(view, version or view.current, ask)))
        filters = [ask.params.filter for _, ask in asks if ask.params.filter is not None]
        answers: Answers | None = None
        while True:
            for where in filters:
                self._make_filterable(where)
            found = []
            try:
                with self._lock.read():
                    if not all(map(self._metadata.filterable, filters)):  # somebody wrote the first item with a key
                        continue
                    view = self._view
                    for version, ask, made in embedded:
                        if ask.stored and any(self._written(key) != seq for key, seq in ask.stored.items()):
                            raise GalleryChanged
                        name = version or view.current
                        query = prepared(view, self._metadata, name, ask, made)
                        found.append(result(view, self._metadata, name, made, query, scatter(query, answers)))
            except Unanswered as waiting:  # for engines, beside whoever writes
                answers = waiting.answers
                answers.ask()
            else:
                return found

    def _make_filterable(self, where: Filter) -> None:
        """Have a filter find every item: at the first of its kind in steps, between which others query and write."""
        while not self._metadata.filterable(where):
            with self._alone():
                self._metadata.enter(where)

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
        there = list(dict.fromkeys(chain.from_iterable(keys for keys, _ in placed.values())))
        with self._changing:
            # What takes long is done while others query.
            described = self._metadata.compare(there, items)
            self._shards.make(placed, self._topology.versions, self._topology.spaces)
            self._shards.reserve(placed)
            if order is not None:
                self._shards.prepare(order, self._metadata.slots())
            with self._swap():
                if order is not None:
                    self._shards.prefer(order, self._metadata.slots())
                self._metadata.take(described)
                slots = {place: self._metadata.slots_of(keys) for place, (keys, _) in placed.items()}
                self._shards.put(placed, slots, removed)
                self._metadata.drop(removed)
                if self._missing:
                    for key in (*removed, *there):
                        self._missing.pop(key, None)
                self._missing.update(missing)
                self._seq = self._seq if seq is None else seq
                self._current = self._current if current is None else current
                if calibrations is not None:
                    self._topology = self._topology.calibrated(*calibrations)

    def load(self, items: Contents) -> Keys:
        """Take in items that are not there yet, and the vectors of those whose vectors sealed segments hold.

        Returns the keys of the others (N,), which `apply` is to bring: of them all else is known.
        """
        with self._change(), ThreadPoolExecutor(1, "segments") as thread:
            # Segments are hashed meanwhile, which takes no interpreter; the metadata take nothing else.
            made = thread.submit(self._shards.make, items.held, self._topology.versions, self._topology.spaces)
            slots_N = self._metadata.load(items)
            made.result()
            sealed_N = self._shards.sealed(items)
            self._shards.load(items.only(sealed_N), slots_N[sealed_N])
        return items.keys_N[~sealed_N]

    def in_memory(self, place: ShardKey, keys_N: Keys) -> tuple[Mask, Vectors]:
        """Which of these items' vectors of one version and origin this process has (N,), and those (M, D), in order."""
        with self._lock.read():
            return self._shards.in_memory(place, keys_N)

    def contents(self) -> tuple[Contents, int] | None:
        """What `load` takes of all there is, and the feed number; None while items are left out."""
        with self._lock.read():
            taken = None if self._missing else (self._metadata.copied(), self._shards.copied(), self._seq)
        return taken and (of_slots(*taken[:2]), taken[2])

    def unsealed(self) -> int:
        """Embeddings that lie in no segment yet: a snapshot does not say what vectors they are."""
        with self._lock.read():
            return self._shards.unsealed()

    def filterable(self, where: Filter) -> bool:
        """Whether a filter finds every item already; the first one by its keys has to make it so."""
        return self._metadata.filterable(where)

    def bytes(self) -> int:
        """Roughly what it takes of memory, files that are mapped into it among them."""
        with self._lock.read():
            return self._shards.bytes() + self._metadata.bytes()

    def prefer(self, order: Sequence[str]) -> None:
        """Serve each item by the first of these versions that it holds an embedding of; in one step, at any size."""
        with self._changing:
            self._shards.prepare(order, self._metadata.slots())
            with self._swap():
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
        if config != self.config:
            with self._change():
                self._shards.configure(config)

    @property
    def remote(self) -> RemotePart:
        """The part that lies in engines elsewhere, or is to."""
        return RemotePart(self._shards, self._lock.read, self._change, self._metadata.seqs)

    def build_index(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Seal, index or merge the rows of one shard where that is due, beside queries and writes; False: nothing was.

        It may take minutes; once `stopped` it gives up. One caller at a time.
        """
        with self._alone():
            due = self._shards.due()
        if due is None or not due[1].run(stopped):
            return False
        shard, job = due
        with self._changing:
            shard.finish(job)
            with self._swap():  # nobody searches what is replaced any more
                pass
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
        """Items that a query of a version is compared with; infinite where a route leads on, or while it is written."""
        return math.inf if self._lock.contended else self._view.rows_scanned(query_version)

    def items_by_version(self, order: Sequence[str] | None = None) -> dict[str, int]:
        """Items per version that serves them, versions without any left out; `order`: as it would be in this one."""
        with self._lock.read():
            if order is None:
                return dict(self._view.items_by_version)
            return self._shards.items_in(order, self._metadata.slots())

    def unreachable(self, query_version: str, encoders: frozenset[str]) -> tuple[Degraded, ...]:
        """The items that queries of `query_version` could not reach now."""
        view = self._view
        return view.topology.routes(query_version, view.items_by_version, encoders)[1]

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
    def _alone(self) -> Iterator[None]:
        """Nobody reads or writes."""
        with self._changing, self._lock.write():
            yield

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Something about what is served changes; nobody reads or writes."""
        with self._changing, self._swap():
            yield

    @contextmanager
    def _swap(self) -> Iterator[None]:
        """The same for whoever has worked out what changes, and keeps others from it meanwhile."""
        with self._lock.write():
            try:
                yield
            finally:
                self._view = self._seen()

    def _seen(self) -> View:
        return View(self._topology, self._shards.serving(), tuple(self._left_out()), self._current, self._seq)
