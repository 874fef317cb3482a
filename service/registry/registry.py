"""The registered versions and declared edges that this process has loaded, following SQL and the disk (`Registry`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from index.edges.graph import Graph, Route
from index.errors import ChangedOnDisk, InvalidVersionFolder, NoTextEntrance, RegraftError, shortened
from index.events import Event
from index.version import EDGE, Edge, EdgeKey, EdgeKind, Version
from index.version_folder.card import parse_card
from index.version_folder.folder import load_version
from service.errors import EdgeBroken, NoCurrentVersion, UnknownVersion
from service.registry.edge_records import EdgeOrigin, EdgeRecord, edge_ids, edge_rows, open_edge
from service.registry.fetched_folders import edge_key, fetch_folder, version_key
from service.registry.loaded_version import LoadedVersion
from service.registry.version_records import registered_rows, version_ids
from service.settings import Settings
from service.store.blob_references import check_store
from service.store.database.connections import Database
from service.store.image_store.blobs import StoreUnreachable
from service.store.image_store.folders import FolderStore
from service.store.rows import GalleryRow, VersionRow

logger = logging.getLogger(__name__)


class Registry:
    """Every registered version and declared edge, as of the last `sync` with SQL.

    Other processes may register versions, so an unknown one is looked up in SQL first. Callers that need the newest
    edges call `sync_edges`: the replica at each poll, and each change of a gallery or an edge.
    """

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self.edges_folder = settings.edges
        """The folder of edges that did not come with a version."""
        self.folders = FolderStore(settings.blobs_url, partial(check_store, database, settings.blobs_url))
        """The store through which machines share the folders of versions and edges."""
        self._sync_lock = threading.Lock()
        self.folders_lock = threading.Lock()
        """Held while the folder of a version is added or removed."""
        self._by_id: dict[int, LoadedVersion] = {}
        self._by_name: dict[str, LoadedVersion] = {}
        self._edges: tuple[EdgeRecord, ...] = ()
        self._graph = Graph()
        # Versions whose files, or those of edges from them, could not be fetched: the store did not answer.
        self._unreached: set[str] = set()

    def sync(self) -> None:
        """Load versions and edges that were added since the last call, and forget those that were removed."""
        with self._sync_lock:
            with self._database.read() as connection:  # one snapshot: both ends of each edge are among the versions
                ids = edge_ids(connection)
                rows = registered_rows(connection)
            loaded = {row.id: self._by_id.get(row.id) or self._load(row) for row in rows}
            self._by_id |= loaded
            self._follow_edges(ids)
            # Last: a version that is found by name has its edges, and no edge leads to a removed version.
            self._by_id = loaded
            self._by_name = {registered.name: registered for registered in loaded.values()}

    def _load(self, row: VersionRow) -> LoadedVersion:
        folder = self._settings.versions / row.name
        try:
            loaded = self._load_folder(row)
        except (RegraftError, OSError) as error:
            self._unreached |= {row.name} if isinstance(error, StoreUnreachable) else set()
            logger.error(Event("version_quarantined", version=row.name, reason=error))  # noqa: TRY400
            return LoadedVersion(row, Version(parse_card(row.card), folder), self._settings, str(error))
        return LoadedVersion(row, loaded, self._settings)

    def _load_folder(self, row: VersionRow) -> Version:
        """Load a version's folder, which must be as registered; if missing or damaged, it is fetched from the store."""
        folder = self._settings.versions / row.name
        try:
            return load_version(folder, expect_card=row.card_sha256)
        except (RegraftError, OSError):
            if not fetch_folder(self.folders, folder, version_key(row.card_sha256)):
                raise
        return load_version(folder, expect_card=row.card_sha256)

    def recover(self, name: str) -> None:
        """End a version's quarantine if its folder is intact again, and reload all damaged edges.

        Raises:
            InvalidVersionFolder: the folder is not what was registered.
        """
        with self._database.lookup() as connection:
            (row,) = (row for row in registered_rows(connection) if row.name == name)
        self._load_folder(row)
        with self._sync_lock:
            self._by_id[row.id].problem = ""
            self._reload_damaged_edges()

    def retry(self, target: LoadedVersion) -> None:
        """Recover a version and its damaged edges if they are intact again, for a worker that waits for them."""
        if target.problem:
            with suppress(InvalidVersionFolder):
                self.recover(target.name)
        if any(declared.problem and declared.edge.new == target.name for declared in self._edges):
            with self._sync_lock:
                self._reload_damaged_edges()

    def retry_unreached(self) -> None:
        """Retry every version that could not be fetched because the store did not answer."""
        names, self._unreached = self._unreached, set()
        for name in names & self._by_name.keys():
            try:
                self.retry(self._by_name[name])
            except (RegraftError, OSError, SQLAlchemyError):  # often both are away, as they share a network
                self._unreached.add(name)

    def _reload_damaged_edges(self) -> None:
        # No others: the versions of edges that were added since may not be loaded yet.
        self._follow_edges([declared.id for declared in self._edges], reload_damaged=True)

    def sync_edges(self) -> None:
        """Sync if any edge was added or removed, or a version removed."""
        with self._database.lookup() as connection:
            ids, versions = edge_ids(connection), version_ids(connection)
        if set(ids) != {declared.id for declared in self._edges} or not versions.issuperset(self._by_id):
            self.sync()

    def _follow_edges(self, ids: Sequence[int], *, reload_damaged: bool = False) -> None:
        known = {declared.id: declared for declared in self._edges if not (reload_damaged and declared.problem)}
        if set(ids) == set(known):
            return
        with self._database.lookup() as connection:
            rows = edge_rows(connection, set(ids) - set(known))
        for row in rows:
            new, old = self._by_id[row.new_id].version, self._by_id[row.old_id].name
            if row.folder is not None and not (folder := self._settings.edges / row.folder).exists():
                try:
                    fetch_folder(self.folders, folder, edge_key(row.folder), EDGE)
                except (RegraftError, OSError) as error:  # `open_edge` records its missing files as a problem
                    self._unreached |= {new.name} if isinstance(error, StoreUnreachable) else set()
            known[row.id] = open_edge(row, new, old, self._settings)
            if known[row.id].problem:
                logger.error(Event("edge_not_used", edge=known[row.id].edge.key, reason=known[row.id].problem))
        self._set_edges(tuple(known[number] for number in ids if number in known))

    @contextmanager
    def opening(self, edge: Edge) -> Iterator[None]:
        """Context of opening an edge's files; a changed file takes the edge out of the graph. Raises EdgeBroken."""
        new, old, kind = edge.key
        try:
            yield
        except ChangedOnDisk as error:
            if self._was_removed(edge):
                raise EdgeBroken(f"the {kind} edge {new} -> {old} was removed or replaced meanwhile") from error
            self._quarantine(edge, error.message)
            raise EdgeBroken(f"the {kind} edge {new} -> {old} is not used: {error.message}") from error
        except InvalidVersionFolder as error:
            raise EdgeBroken(f"the {kind} edge {new} -> {old} cannot be opened: {error.message}") from error

    def _was_removed(self, edge: Edge) -> bool:
        """Whether another process removed the edge with its files; syncs edges."""
        numbers = {declared.id for declared in self._edges if declared.edge == edge}
        self.sync_edges()
        return numbers.isdisjoint(declared.id for declared in self._edges)

    def _quarantine(self, edge: Edge, problem: str) -> None:
        logger.error(Event("edge_quarantined", edge=edge.key, reason=problem))
        with self._sync_lock:
            for declared in self._edges:
                # An edge that came with a version is in its folder, which therefore differs from what was registered.
                if declared.edge == edge and declared.origin is EdgeOrigin.REGISTERED:
                    self._by_name[edge.new].quarantine(problem)
            self._set_edges(tuple(replace(d, problem=problem) if d.edge == edge else d for d in self._edges))

    def _set_edges(self, edges: tuple[EdgeRecord, ...]) -> None:
        self._edges = edges
        self._graph = Graph(declared.edge for declared in self._edges if not declared.problem)

    def all(self) -> list[LoadedVersion]:
        """The versions that this process has loaded, in order of registration."""
        return sorted(self._by_id.values(), key=lambda registered: registered.id)

    def named(self, name: str) -> LoadedVersion:
        """The version of a name. Raises UnknownVersion."""
        if name not in self._by_name:
            self.sync()
        if name not in self._by_name:
            legal = ", ".join(sorted(self._by_name)) or "none"
            unknown = f"version {shortened(name)!r} is not registered (registered: {legal})"
            raise UnknownVersion(unknown, pointer="/version")
        return self._by_name[name]

    def by_id(self, version_id: int) -> LoadedVersion:
        """The version of a database id from a row."""
        if version_id not in self._by_id:
            self.sync()
        return self._by_id[version_id]

    def current_of(self, gallery: GalleryRow) -> LoadedVersion:
        """The version that is current in a gallery. Raises NoCurrentVersion."""
        if gallery.current_id is None:
            raise NoCurrentVersion.of(gallery.name)
        return self.by_id(gallery.current_id)

    def encoders(self) -> frozenset[str]:
        """Names of the versions that can encode images."""
        return frozenset(r.name for r in self.all() if r.can_embed("images"))

    def text_encoders(self) -> frozenset[str]:
        """Names of the versions that can encode texts."""
        return frozenset(r.name for r in self.all() if r.can_embed("texts"))

    def check_reads_texts(self, target: LoadedVersion, pointer: str) -> None:
        """Raise NoTextEntrance, which names the versions with one, if a version does not embed texts."""
        if not target.card.text:
            legal = ", ".join(sorted(self.text_encoders())) or "none"
            why = f"version {target.name!r} has no text entrance (versions with one: {legal})"
            raise NoTextEntrance(why, pointer=pointer)

    def drop_idle(self, needed: Collection[str] = ()) -> None:
        """Drop encoders that are idle for longer than the setting; those of versions in `needed` are not idle."""
        for registered in self.all():
            registered.drop_idle(registered.name in needed, self._settings.encoder_idle_seconds)

    def edges(self) -> tuple[EdgeRecord, ...]:
        """All declared edges in order of declaration; those with a `problem` are not in the graph.

        Returns the same tuple object until an edge is added, removed or quarantined.
        """
        return self._edges

    def state(self) -> tuple[object, object]:
        """Two objects to compare by identity: the same until a version or edge is added, removed or quarantined."""
        return self._by_id, self._edges

    def item_edges_to(self, target: LoadedVersion) -> list[EdgeRecord]:
        """The item edges that lead to a version, also those with a `problem`; syncs edges."""
        self.sync_edges()
        leading = (declared for declared in self._edges if declared.edge.new == target.name)
        return [declared for declared in leading if declared.edge.kind is EdgeKind.FORWARD]

    def edge(self, key: EdgeKey) -> EdgeRecord | None:
        """The edge of this key, if there is one."""
        return next((declared for declared in self._edges if declared.edge.key == key), None)

    def graph(self) -> Graph:
        """The graph of all usable edges."""
        return self._graph

    def route(self, new: str, old: str) -> Route | None:
        """The route of image queries, else of text queries, of version `new` to items of `old`."""
        by_texts = self.text_encoders()
        images = self._graph.route(new, old, self.encoders())
        return images or (self._graph.route(new, old, by_texts) if new in by_texts else None)

    def needed(self, query_version: str, serving: Iterable[str]) -> set[str]:
        """Names of the versions that must embed queries of one version to reach items of the versions `serving`."""
        routes = (self.route(query_version, version) for version in serving)
        return {query_version, *(name for route in routes if route is not None for name in route.encoders)}
