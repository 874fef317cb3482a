"""The replica: galleries in memory, each loaded on first use and kept up to date with the database.

`refresh` reads the current version and the changed items in one SQL snapshot and applies them in one step
(`_catch_up`). A thread polls for writes of other processes. After its own writes this process calls `refresh`, so that
clients read what they wrote, or, for new items, `apply_added`, which does not read them back.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from index.engines.remote.base import OpenCollection
from index.events import Event
from index.garbage_collection import gc_paused
from service.errors import UnknownGallery
from service.registry.calibrations import maps_of
from service.registry.edge_records import EdgeRecord
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.registry.storing import AddedItems
from service.registry.trial_records import active_trial
from service.replica.cache import Cache
from service.replica.engines import no_engines
from service.replica.feed import gather_changes
from service.replica.index_files import sweep
from service.replica.load_progress import LoadProgress
from service.replica.loaded import LoadedGallery
from service.replica.loading import load_items
from service.replica.snapshots import write_if_due
from service.store.database.connections import Database
from service.store.galleries.change_feed import changes
from service.store.galleries.gallery import gallery_named, gallery_row, gallery_states, index_of
from service.store.galleries.items import live_keys
from service.store.outages import log_failure
from service.store.rows import GalleryRow

logger = logging.getLogger(__name__)


class Replica:
    """The galleries in memory, which follow the database."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        indexes: Path,
        poll_seconds: float,
        memory: int = sys.maxsize,
        *,
        shared: bool = False,
        collections_of: Callable[[GalleryRow], OpenCollection] = no_engines,
    ) -> None:
        """`indexes`: the folder of all galleries' sealed segments, a cache; `memory`: bytes that galleries may take.

        `shared`: clients also write through other processes and must read here what those acknowledged.
        `collections_of`: opens a gallery's collections in engines.
        """
        self._shared, self._collections_of = shared, collections_of
        self._database = database
        self._indexes = indexes
        self._registry = registry
        self._changes = database.change_waiter(poll_seconds)
        self.cache: Cache[LoadedGallery] = Cache(memory)
        # The state of the database and the edges up to which every gallery has followed.
        self._followed: object = None
        self._followed_edges: tuple[EdgeRecord, ...] | None = None
        # Name -> the number of the gallery that had it, and the state of the database then.
        self._names: dict[str, tuple[object, int]] = {}
        # The progress of each running load, by the gallery's number.
        self._progress: dict[int, LoadProgress] = {}
        self._poll_lock = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="replica", daemon=True)
        self.forgotten = 0
        """How many galleries were forgotten, of which files may be left."""
        self.failure: str | None = None
        """Why the feed could not be followed at the last attempt."""

    def start(self) -> None:
        """Load versions and edges, then follow the loaded galleries."""
        self._registry.sync()
        for failure in self._poll():
            raise failure
        self._thread.start()

    def stop(self) -> None:
        """Stop following, and wait for the thread."""
        self._changes.stop()
        self._thread.join()
        self._changes.close()

    def all(self) -> list[LoadedGallery]:
        """Every gallery in memory, in order of creation."""
        return self.cache.all()

    def find(self, name: str) -> LoadedGallery:
        """The current gallery of a name: another process may have deleted it and created another of that name.

        Raises:
            UnknownGallery: there is none.
        """
        if (loaded := self.find_cached(name)) is not None:
            return loaded
        moment = self._database.commit_marker()
        with self._database.lookup() as connection:
            row = gallery_named(connection, name)
        loaded = self.get(row.id)
        if self._shared and loaded.seq < row.next_seq - 1:
            self.refresh(row.id)
            loaded = self.get(row.id)
        self._names[name] = moment, row.id
        return loaded

    def find_cached(self, name: str) -> LoadedGallery | None:
        """The gallery of a name without a lookup, if nothing was written since the last lookup; else None."""
        if not self._database.is_sqlite or name not in self._names:
            return None
        moment, gallery_id = self._names[name]
        return self.cache.get(gallery_id) if moment == self._database.commit_marker() else None

    def is_loaded(self, name: str) -> bool:
        """Whether the gallery last found by this name is loaded; if not, `find` may take seconds."""
        return name in self._names and self.cache.get(self._names[name][1]) is not None

    def get(self, gallery_id: int) -> LoadedGallery:
        """The gallery of a number, loaded if necessary. Raises UnknownGallery if it was deleted."""
        loaded = self.cache.get(gallery_id)
        return loaded or self.cache.load(gallery_id, partial(self._load, gallery_id), self._catch_up)

    def loading(self) -> list[LoadProgress]:
        """The progress of running loads, by gallery name."""
        return sorted(self._progress.copy().values(), key=lambda progress: progress.gallery)

    def progress(self, name: str) -> LoadProgress | None:
        """The progress of a gallery's load; None: it is not being loaded."""
        return next((progress for progress in self.loading() if progress.gallery == name), None)

    def refresh(self, gallery_id: int) -> None:
        """Apply everything committed before this call; a deleted gallery is forgotten.

        A gallery that is not in memory needs nothing; one that is being loaded catches up before use.
        """
        loaded = self.cache.in_use(gallery_id)
        if loaded is not None and not self._catch_up(loaded):
            self.forget(gallery_id)

    def apply_added(self, gallery_id: int, added: AddedItems | None) -> None:
        """Apply items that this process has just added without reading them back, if they are next in the feed.

        Else `refresh`. Every other change, such as by a deployment, a gate or the index, takes a feed number, too, so
        that none is missed.
        """
        loaded = self.cache.in_use(gallery_id)
        if loaded is None or added is None or not loaded.extend(added):
            self.refresh(gallery_id)
        else:
            self.cache.make_room()

    def moving(self, gallery_id: int, current: LoadedVersion) -> int:
        """How many live items another embedding would serve if this version were current; refreshes first."""
        self.refresh(gallery_id)
        return self.get(gallery_id).moving(current)

    def items_by_version(self, gallery_id: int, order: Sequence[str]) -> Mapping[str, int]:
        """How many live items each version would serve with this order of preference; refreshes first."""
        self.refresh(gallery_id)
        return self.get(gallery_id).gallery.items_by_version(order)

    def sweep_indexes(self) -> None:
        """Remove index files that nobody reads again, see `index_files.sweep`."""
        sweep(self._database, self._indexes, lambda gallery_id: self.cache.in_use(gallery_id) is not None)

    def write_snapshot(self, loaded: LoadedGallery, *, settled: bool) -> None:
        """Write a snapshot of a gallery if one is due; at most one caller per gallery at a time."""
        write_if_due(self._database, loaded, settled=settled)

    def forget(self, gallery_id: int) -> None:
        """Drop a deleted gallery."""
        self.cache.drop(gallery_id)
        self._names.clear()
        self.forgotten += 1

    def _follow(self) -> None:
        while self._changes.wait():
            failures = self._attempt()
            if failures and self.failure is None:
                log_failure(logger, Event("feed_not_followed"), failures[0])
            self.failure = f"{type(failures[0]).__name__}: {failures[0]}" if failures else None

    def _attempt(self) -> list[Exception]:
        try:
            return self._poll()
        except Exception as error:  # the next attempt may succeed
            return [error]

    def _poll(self) -> list[Exception]:
        """Catch up with each gallery in memory that changed, and forget deleted ones; returns the errors."""
        with self._poll_lock:
            self._forget_other_timelines()
            moment = self._database.commit_marker()
            if moment == self._followed and self._registry.edges() is self._followed_edges:
                return []
            # The next poll finds later changes, and retries galleries that fail.
            self._followed, failures = None, []
            try:
                self._registry.sync_edges()
            except Exception as error:  # queries continue along the previous edges
                failures.append(error)
            edges = self._registry.edges()
            by_id = {loaded.id: loaded for loaded in self.all()}
            with self._database.lookup() as connection:
                galleries = gallery_states(connection, list(by_id)) if by_id else {}
            for deleted in set(by_id) - set(galleries):
                self.forget(deleted)
            for gallery_id, (next_seq, current_id) in galleries.items():
                try:
                    self._follow_gallery(by_id[gallery_id], next_seq - 1, current_id)
                except Exception as error:  # a damaged gallery must not block the others
                    failures.append(error)
            if not failures:
                self._followed, self._followed_edges = moment, edges
        return failures

    def _forget_other_timelines(self) -> None:
        """Forget galleries read before a failover: the last changes may be lost, and others have their feed numbers."""
        timeline = self._database.timeline()
        for loaded in self.all():
            if loaded.is_of_other(timeline):
                logger.warning(Event("gallery_of_another_timeline", gallery=loaded.name, then="it is loaded anew"))
                self.forget(loaded.id)

    def _follow_gallery(self, loaded: LoadedGallery, seq: int, current_id: int | None) -> None:
        up_to_date = loaded.is_at(seq, current_id) and loaded.followed_edges is self._registry.edges()
        if not up_to_date and not self._catch_up(loaded):
            self.forget(loaded.id)

    def _load(self, gallery_id: int) -> LoadedGallery:
        """Load a gallery; one that was unloaded but is still in use followed the feed and is reused."""
        if (unloaded := self.cache.in_use(gallery_id)) is not None and self._catch_up(unloaded):
            return unloaded
        self._registry.sync_edges()
        timeline = self._database.timeline()
        with self._database.lookup() as connection:
            row = gallery_row(connection, gallery_id)
        if row is not None:
            loaded = LoadedGallery(row, self._registry, self._indexes / str(row.id), self._collections_of(row))
            loaded.timeline = timeline
            progress = LoadProgress(row.name)
            self._progress[gallery_id] = progress
            try:
                with gc_paused():
                    complete = self._catch_up(loaded, progress)
            finally:
                del self._progress[gallery_id]
            if complete:
                progress.end()
                return loaded
        raise UnknownGallery("the gallery was deleted")

    def _catch_up(self, loaded: LoadedGallery, loading: LoadProgress | None = None) -> bool:
        """Read the changes after `loaded.seq` in one SQL snapshot and apply them; with `loading`, read everything.

        False: the gallery was deleted, or the database went back, as after a failover that lost the last writes.
        """
        # Rows become arrays: collecting garbage among them would delay queries and find nothing.
        with loaded.applying, gc_paused():
            edges = self._registry.edges()  # before the calibrations fitted along them
            with self._database.read() as connection:
                row = gallery_row(connection, loaded.id)
                if row is None or row.next_seq - 1 < loaded.seq:
                    return False
                edges_unchanged = loaded.followed_edges is edges
                if loading is None and edges_unchanged and loaded.is_at(row.next_seq - 1, row.current_id):
                    loaded.declare()
                    return True
                current = None if row.current_id is None else self._registry.by_id(row.current_id)
                trial, gates = active_trial(connection, self._registry, loaded.id)
                # A removal of an edge deletes the calibrations fitted along it, and nothing else does.
                calibrations = (
                    None if edges_unchanged and gates == loaded.gates else maps_of(connection, self._registry, gates)
                )
                if loading is not None:
                    load_items(connection, self._registry, loaded, loading)
                blocks, purged = [], set[int]()
                if loaded.seq or loading is None:
                    blocks = list(changes(connection, loaded.id, loaded.seq, loaded.fill_from_memory))
                    if loaded.seq < row.purged_seq:
                        purged = set(loaded.gallery.keys()).difference(live_keys(connection, loaded.id).tolist())
            gathered = gather_changes(self._registry, blocks)
            gathered.removed += purged.difference(gathered.removed)
            loaded.apply(gathered, row.next_seq - 1, current, calibrations)
            loaded.trial, loaded.gates, loaded.followed_edges = trial, gates, edges
            loaded.gallery.configure(index_of(row))
            loaded.bytes = loaded.gallery.bytes()
        if loading is None:
            self.cache.make_room()
        return True
