"""`FetchedFolders`: the versions and edges that a remote worker has fetched, verified by the service's sha256."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from index.encoders.encoder import Encoder
from index.errors import InvalidVersionFolder, NoRoute
from index.execution import Execution
from index.incoming import exclusive_access, incoming_folder, sweep
from index.isolated import Limits, verify_isolated
from index.version import Card, Edge, EdgeKey, EdgeKind, Version
from index.version_folder.archive import unpack_version
from index.version_folder.folder import load_version
from regraft.client import Client
from regraft.models import WorkEdge
from service.registry import edge_archive
from service.registry.encoders.text_entrances import open_texts
from service.registry.stored_contents import TextEntrance

EDGES = ".edges"
"""The folder of edges, by their two versions and their sha256; not a legal name of a version."""

T = TypeVar("T")


class RemoteVersion:
    """A fetched version."""

    def __init__(
        self, number: int, loaded: Version, sha256: str, execution: Execution, apis: Collection[str] = ()
    ) -> None:
        self.id = number
        self.version = loaded
        self.sha256 = sha256
        self._execution = execution
        self._apis = apis
        self._encoder: Encoder | None = None
        self._text_encoder: TextEntrance | None = None

    @property
    def name(self) -> str:
        """The version's name."""
        return self.version.name

    @property
    def card(self) -> Card:
        """The version's card."""
        return self.version.card

    def encoder(self) -> Encoder:
        """Its encoder, loaded on first use."""
        if self._encoder is None:
            self._encoder = Encoder(self.version, self._execution)
        return self._encoder

    def text_encoder(self) -> TextEntrance:
        """Its text entrance, loaded on first use."""
        if self._text_encoder is None:
            self._text_encoder = open_texts(self.version, self._execution, self._apis)
        return self._text_encoder


@dataclass(frozen=True)
class RemoteEdge:
    """A fetched edge with its number in the service."""

    id: int
    edge: Edge

    def check(self) -> None:
        """Does nothing: its sha256 was verified when it was fetched."""


class FetchedFolders:
    """The fetched folders of a worker."""

    def __init__(
        self, client: Client, folder: Path, execution: Execution, limits: Limits, apis: Collection[str] = ()
    ) -> None:
        """`apis`: URLs of the embedding APIs that versions may call."""
        self._apis = apis
        self._client = client
        self._limits = limits
        self._folder = folder
        self._execution = execution
        self._versions: list[RemoteVersion] = []
        self._edges: dict[int, RemoteEdge] = {}
        sweep(folder)

    def version(self, name: str, expected: str) -> RemoteVersion:
        """The version whose card has the sha256 `expected`. Raises InvalidVersionFolder if the service has another."""
        known = next((v for v in self._versions if (v.name, v.sha256) == (name, expected)), None)
        if known is None:
            loaded = self._load_version(name, expected)
            known = RemoteVersion(len(self._versions), loaded, expected, self._execution, self._apis)
            self._versions.append(known)
        elif _deleted(known.version.folder):
            self._load_version(name, expected)
        return known

    def by_id(self, version_id: int) -> RemoteVersion:
        """The version by the id that `version` gave it."""
        return self._versions[version_id]

    def edge(self, new: str, named: WorkEdge) -> RemoteEdge:
        """An edge of version `new`, as named by a claim. Raises InvalidVersionFolder if the service has another."""
        if named.id not in self._edges or _deleted(self._edges[named.id].edge.folder):
            self._edges[named.id] = RemoteEdge(named.id, self._load_edge(new, named))
        return self._edges[named.id]

    def _load_version(self, name: str, expected: str) -> Version:
        folder = self._folder / name

        def check(archive: Path, into: Path) -> None:
            unpack_version(archive, into)
            load_version(into, expect_card=expected)
            verify_isolated(into, None, self._limits)  # the service verified it on another machine

        def fetch() -> None:
            with incoming_folder(self._folder) as place:
                _put(place, self._client.work_version(name), folder, check)

        return self._kept(lambda: load_version(folder, expect_card=expected), fetch)

    def _load_edge(self, new: str, named: WorkEdge) -> Edge:
        folder = self._folder / EDGES / new / named.old / named.sha256

        def check(archive: Path, into: Path) -> None:
            edge_archive.unpack(archive, into, new, named.old, named.sha256)

        def fetch() -> None:
            with incoming_folder(self._folder) as place:
                _put(place, self._client.work_edge(named.id), folder, check)
            for replaced in set(folder.parent.iterdir()) - {folder}:
                shutil.rmtree(replaced, ignore_errors=True)

        return self._kept(lambda: edge_archive.load(folder, new, named.old, named.sha256), fetch)

    def _kept(self, load: Callable[[], T], fetch: Callable[[], None]) -> T:
        """Load a folder; fetch it first if it is missing or changed. Of workers that share the cache, one fetches."""
        with suppress(InvalidVersionFolder, OSError):
            return load()
        with exclusive_access(self._folder):
            with suppress(InvalidVersionFolder, OSError):  # another worker may have fetched it
                return load()
            fetch()
            return load()


def _deleted(folder: Path | None) -> bool:
    """Whether a folder is gone, since a cache may be emptied at any time: models are opened after it was loaded."""
    return folder is not None and not folder.is_dir()


class TaskVersions:
    """The versions and edges of one task, limited to the edges that its claim names."""

    def __init__(self, folders: FetchedFolders, new: str, edges: Sequence[WorkEdge]) -> None:
        self._folders = folders
        self._new = new
        self._edges = {edge.old: edge for edge in edges}

    def start(self, old: str) -> RemoteVersion:
        """The version `old`, from which an edge of the claim starts. Raises NoRoute if there is no such edge."""
        named = self._edges.get(old)
        if named is None:
            raise NoRoute(f"the claimed chunk has no edge from {old!r} to {self._new!r}")
        return self._folders.version(old, named.old_card_sha256)

    def by_id(self, version_id: int) -> RemoteVersion:
        """The version by the id that `start` gave it."""
        return self._folders.by_id(version_id)

    def sync_edges(self) -> None:
        """Does nothing: the edges of a task do not change."""

    def edge(self, key: EdgeKey) -> RemoteEdge | None:
        """The edge of the claim with this key; None: there is none."""
        new, old, kind = key
        if (new, kind) != (self._new, EdgeKind.FORWARD.value) or old not in self._edges:
            return None
        return self._folders.edge(new, self._edges[old])

    def opening(self, edge: Edge) -> AbstractContextManager[None]:
        """Does nothing: if an edge has changed on disk, the task fails."""
        return nullcontext()


def _put(place: Path, content: bytes, folder: Path, check: Callable[[Path, Path], None]) -> None:
    """Unpack and check an archive in `place`, then rename it to `folder`, so that a kill leaves no partial folder."""
    archive, unpacked = place / "archive.zip", place / "folder"
    archive.write_bytes(content)
    check(archive, unpacked)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unpacked.rename(folder)
