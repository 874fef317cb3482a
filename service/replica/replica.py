"""The replica: the galleries that were asked for, each loaded then and kept at what the database says.

`refresh` reads one snapshot - current version and changed items - and applies it as one step. A thread looks for news
of other processes; this process calls `refresh` after its own writes, so that whoever wrote reads it back, or `take`
with what it has added, which is then not read.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from sqlalchemy import Connection

from index.contents import Contents
from index.engines.remote import OpenCollection
from index.events import Event
from index.garbage_collection import gc_paused
from service.errors import UnknownGallery
from service.registry.calibrations import maps_of
from service.registry.edge_records import EdgeRecord
from service.registry.registry import LoadedVersion, Registry
from service.registry.rollout_records import deployed
from service.registry.storing import AddedItems
from service.replica.cache import Cache
from service.replica.engines import no_engines
from service.replica.feed import FeedChanges, ahead, gather_changes
from service.replica.load_progress import LoadProgress
from service.replica.loaded import LoadedGallery
from service.replica.snapshots import has_segments, keep_if_due, newest
from service.store.contents import contents
from service.store.database import Database
from service.store.repository import (
    changes,
    feed_of,
    galleries_now,
    gallery_named,
    gallery_row,
    index_of,
    live_items,
    live_keys,
)
from service.store.rows import GalleryRow

logger = logging.getLogger(__name__)


class Replica:
    """The galleries that are asked for, live."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        indexes: Path,
        poll_seconds: float,
        memory: int = sys.maxsize,
        *,
        shared: bool = False,
        elsewhere: Callable[[GalleryRow], OpenCollection] = no_engines,
    ) -> None:
        """`indexes`: the folder of all galleries' sealed segments, a cache; `memory`: bytes that galleries may take.

        `shared`: clients write through other processes too, and read here what those acknowledged. `elsewhere`: opens
        the collections of a gallery in engines.
        """
        self._shared, self._elsewhere = shared, elsewhere
        self._database = database
        self._indexes = indexes
        self._registry = registry
        self._news = database.news(poll_seconds)
        self.cache: Cache[LoadedGallery] = Cache(memory)
        # Up to where everything has been followed: the database, and the edges that all galleries know.
        self._seen: object = None
        self._seen_edges: tuple[EdgeRecord, ...] | None = None
        # Name -> the moment at which the gallery of this number had it.
        self._names: dict[str, tuple[object, int]] = {}
        # How far the load of each gallery that is under way is, by number.
        self._progress: dict[int, LoadProgress] = {}
        self._discovering = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="replica", daemon=True)
        self.failure: str | None = None
        """Why the feed could not be followed at the last attempt."""

    def start(self) -> None:
        """Learn versions and edges, then follow what is loaded."""
        self._registry.sync()
        for failure in self._look():
            raise failure
        self._thread.start()

    def stop(self) -> None:
        """Stop following and wait for it."""
        self._news.wake()
        self._thread.join()
        self._news.close()

    def all(self) -> list[LoadedGallery]:
        """Every gallery in memory, in order of creation."""
        return self.cache.all()

    def find(self, name: str) -> LoadedGallery:
        """The gallery of a name, as it is now: another process may have deleted one and made another of its name.

        Raises:
            UnknownGallery: there is none.
        """
        if (live := self.known(name)) is not None:
            return live
        moment = self._database.moment()
        with self._database.lookup() as connection:
            row = gallery_named(connection, name)
        live = self.get(row.id)
        if self._shared and live.seq < row.next_seq - 1:
            self.refresh(row.id)
            live = self.get(row.id)
        self._names[name] = moment, row.id
        return live

    def known(self, name: str) -> LoadedGallery | None:
        """The same where memory can tell, at no cost: nothing was written since it was looked up; else None."""
        if not self._database.watched or name not in self._names:
            return None
        moment, gallery_id = self._names[name]
        return self.cache.get(gallery_id) if moment == self._database.moment() else None

    def is_loaded(self, name: str) -> bool:
        """Whether the gallery that had this name last is loaded: if not, finding it may take seconds."""
        return name in self._names and self.cache.get(self._names[name][1]) is not None

    def get(self, gallery_id: int) -> LoadedGallery:
        """The gallery of a number, loaded if it is not. Raises UnknownGallery when it was deleted."""
        live = self.cache.get(gallery_id)
        return live or self.cache.load(gallery_id, partial(self._open, gallery_id), self._catch_up)

    def loading(self) -> list[LoadProgress]:
        """How far the loads are that are under way, by name."""
        return sorted(self._progress.copy().values(), key=lambda progress: progress.gallery)

    def progress(self, name: str) -> LoadProgress | None:
        """How far the load of a gallery is, where one is under way."""
        return next((progress for progress in self.loading() if progress.gallery == name), None)

    def refresh(self, gallery_id: int) -> None:
        """Apply everything committed before this call; a gallery that is gone is forgotten.

        One that is not in memory will be read as it is then; one that is being loaded is told before anybody gets it.
        """
        live = self.cache.in_use(gallery_id)
        if live is not None and not self._catch_up(live):
            self.forget(gallery_id)

    def take(self, gallery_id: int, added: AddedItems | None) -> None:
        """`refresh` after a commit of this process that added these items, without reading them back.

        Only where they are next in the feed. Whatever else it tells of - deployments, gates, the index - takes a number
        of its own, so that nothing of that has changed then.
        """
        live = self.cache.in_use(gallery_id)
        if live is None or added is None or not live.extend(added):
            self.refresh(gallery_id)
        else:
            self.cache.make_room()

    def moving(self, gallery_id: int, current: LoadedVersion) -> int:
        """Live items that another embedding would serve if this version were current, by everything committed."""
        self.refresh(gallery_id)
        return self.get(gallery_id).moving(current)

    def items_by_version(self, gallery_id: int, order: Sequence[str]) -> Mapping[str, int]:
        """Live items per version that would serve them in this order of versions, by everything committed."""
        self.refresh(gallery_id)
        return self.get(gallery_id).gallery.items_by_version(order)

    def sweep_indexes(self) -> None:
        """Remove the segments of galleries that there are not."""
        found = set(self._indexes.glob("*"))  # before the galleries are: others make some meanwhile
        with self._database.lookup() as connection:
            used = {self._indexes / str(gallery_id) for gallery_id in galleries_now(connection)}
        for place in found - used:
            shutil.rmtree(place, ignore_errors=True)

    def keep_snapshot(self, live: LoadedGallery, *, settled: bool) -> None:
        """Write down what a gallery holds if that is due; one caller at a time for a gallery."""
        keep_if_due(self._database, live, settled=settled)

    def forget(self, gallery_id: int) -> None:
        """Drop a deleted gallery."""
        self.cache.drop(gallery_id)
        self._names.clear()

    def _follow(self) -> None:
        while self._news.wait():
            failures = self._attempt()
            if failures and self.failure is None:
                logger.error(Event("feed_not_followed"), exc_info=failures[0])
            self.failure = f"{type(failures[0]).__name__}: {failures[0]}" if failures else None

    def _attempt(self) -> list[Exception]:
        try:
            return self._look()
        except Exception as error:  # whatever it was, it may be over the next time
            return [error]

    def _look(self) -> list[Exception]:
        """Catch up with each gallery in memory that changed, and forget what went; returns what failed."""
        with self._discovering:
            moment = self._database.moment()
            if moment == self._seen and self._registry.edges() is self._seen_edges:
                return []
            # What comes from here on is looked for the next time, and so is what fails.
            self._seen, failures = None, []
            try:
                self._registry.sync_edges()
            except Exception as error:  # queries go on along the edges there were
                failures.append(error)
            seen_edges = self._registry.edges()
            lives = {live.id: live for live in self.all()}
            with self._database.lookup() as connection:
                galleries = galleries_now(connection, list(lives)) if lives else {}
            for gone in set(lives) - set(galleries):
                self.forget(gone)
            for gallery_id, (next_seq, current_id) in galleries.items():
                try:
                    self._follow_one(lives[gallery_id], next_seq - 1, current_id)
                except Exception as error:  # one damaged gallery must not hold up the others
                    failures.append(error)
            if not failures:
                self._seen, self._seen_edges = moment, seen_edges
        return failures

    def _follow_one(self, live: LoadedGallery, seq: int, current_id: int | None) -> None:
        known = live.stands_at(seq, current_id) and live.seen_edges is self._registry.edges()
        if not known and not self._catch_up(live):
            self.forget(live.id)

    def _open(self, gallery_id: int) -> LoadedGallery:
        """A gallery as it is now; one that was unloaded while somebody works with it was followed, and is as good."""
        if (held := self.cache.in_use(gallery_id)) is not None and self._catch_up(held):
            return held
        self._registry.sync_edges()
        with self._database.lookup() as connection:
            row = gallery_row(connection, gallery_id)
        if row is not None:
            live = LoadedGallery(row, self._registry, self._indexes / str(row.id), self._elsewhere(row))
            progress = LoadProgress(row.name)
            self._progress[gallery_id] = progress
            try:
                with gc_paused():
                    whole = self._catch_up(live, progress)
            finally:
                del self._progress[gallery_id]
            if whole:
                progress.end()
                return live
        raise UnknownGallery("the gallery was deleted")

    def _catch_up(self, live: LoadedGallery, building: LoadProgress | None = None) -> bool:
        """Read one snapshot behind `live.seq` and apply it; `building`: all there is.

        False: the gallery is gone, or the database an older one since, as after a failover that lost the last writes.
        """
        # Rows become arrays: a look at them for garbage holds up queries, and finds none.
        with live.applying, gc_paused():
            edges = self._registry.edges()  # before what was fitted along them
            with self._database.read() as connection:
                row = gallery_row(connection, live.id)
                if row is None or row.next_seq - 1 < live.seq:
                    return False
                known = live.seen_edges is edges
                if building is None and known and live.stands_at(row.next_seq - 1, row.current_id):
                    live.declare()
                    return True
                current = None if row.current_id is None else self._registry.by_id(row.current_id)
                rollout, gates = deployed(connection, self._registry, live.id)
                # Whoever removes an edge deletes what was fitted along it, and nothing else.
                fitted = None if known and gates == live.gates else maps_of(connection, self._registry, gates)
                if building is not None:
                    self._build(connection, live, building)
                blocks, purged = [], set[int]()
                if live.seq or building is None:
                    blocks = list(changes(connection, live.id, live.seq, live.at_hand))
                    if live.seq < row.purged_seq:
                        purged = set(live.gallery.keys()).difference(live_keys(connection, live.id).tolist())
            found = gather_changes(self._registry, blocks)
            found.removed += purged.difference(found.removed)
            live.apply(found, row.next_seq - 1, current, fitted)
            live.rollout, live.gates, live.seen_edges = rollout, gates, edges
            live.gallery.configure(index_of(row))
            live.bytes = live.gallery.bytes()
        if building is None:
            self.cache.make_room()
        return True

    def _build(self, connection: Connection, live: LoadedGallery, progress: LoadProgress) -> None:
        """Take in what a gallery holds; nobody watches yet, so that a block at a time bounds the memory.

        From a snapshot it stands at that one's number of the feed afterwards, and what came since is to be read.
        """
        live.declare()
        # Where no vector lies elsewhere, every one is read: at once, then, with what is known of the items.
        if not (has_segments(live.folder) or live.gallery.config.kind.is_remote):
            progress.total = live_items(connection, live.id)
            for block in ahead(gather_changes(self._registry, [rows]) for rows in changes(connection, live.id, 0)):
                live.apply(block)
                progress.add(len(block.items) + len(block.missing))
            return
        found = newest(connection, live, {version.name for version in self._registry.all()})
        all_there_is: Iterator[Contents]
        if found is None:
            progress.total = live_items(connection, live.id)
            all_there_is = ahead(contents(connection, live.id, lambda number: self._registry.by_id(number).name))
        else:
            progress.total = len(found[0].keys_N)
            all_there_is = iter([found[0]])
        left: list[int] = []
        for some in all_there_is:
            without = live.gallery.load(some).tolist()
            left += without
            progress.add(len(some.keys_N) - len(without))
        for rows in feed_of(connection, live.id, left):
            live.apply(some_left := gather_changes(self._registry, [rows]))
            progress.add(len(some_left.items) + len(some_left.missing))
        if found is not None:
            live.apply(FeedChanges(), found[1])
            live.snapshot_seq, live.snapshot_unsealed = found[1], len(left)
