"""The versions and edges a remote worker has fetched: folders, each verified by the hash the service names."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from index.archive import unpack_version
from index.encoder import Encoder
from index.errors import InvalidVersionFolder, NoRoute
from index.execution import Execution
from index.folder import load_version
from index.incoming import exclusive_access, incoming_folder, sweep
from index.isolated import Limits, verify_isolated
from index.version import Card, Edge, EdgeKey, EdgeKind, Version
from regraft.client import Client
from regraft.models import WorkEdge
from service.registry import edge_archive
from service.registry.encoders.text_entrances import open_texts
from service.registry.stored_contents import TextEntrance

EDGES = ".edges"
"""Where edges lie, by their two versions and their hash; no version may be named so."""

T = TypeVar("T")


class RemoteVersion:
    """A version that was fetched."""

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
    """An edge that was fetched, with the number it has at the service."""

    id: int
    edge: Edge

    def check(self) -> None:
        """Nothing to do: its hash was verified when it was fetched."""


class FetchedFolders:
    """The fetched folders of a worker."""

    def __init__(
        self, client: Client, folder: Path, execution: Execution, limits: Limits, apis: Collection[str] = ()
    ) -> None:
        """`apis`: the embedding APIs that versions may call."""
        self._apis = apis
        self._client = client
        self._limits = limits
        self._folder = folder
        self._execution = execution
        self._versions: list[RemoteVersion] = []
        self._edges: dict[int, RemoteEdge] = {}
        sweep(folder)

    def version(self, name: str, expected: str) -> RemoteVersion:
        """The version whose card has the sha256 `expected`. Raises InvalidVersionFolder when it is not to be had."""
        known = next((v for v in self._versions if (v.name, v.sha256) == (name, expected)), None)
        if known is None:
            loaded = self._load_version(name, expected)
            known = RemoteVersion(len(self._versions), loaded, expected, self._execution, self._apis)
            self._versions.append(known)
        return known

    def by_id(self, version_id: int) -> RemoteVersion:
        """The version of a number that `version` gave."""
        return self._versions[version_id]

    def edge(self, new: str, named: WorkEdge) -> RemoteEdge:
        """An edge of version `new` as a claim names it. Raises InvalidVersionFolder when it is not to be had."""
        if named.id not in self._edges:
            self._edges[named.id] = RemoteEdge(named.id, self._load_edge(new, named))
        return self._edges[named.id]

    def _load_version(self, name: str, expected: str) -> Version:
        folder = self._folder / name

        def check(archive: Path, into: Path) -> None:
            unpack_version(archive, into)
            load_version(into, expect_card=expected)
            verify_isolated(into, None, self._limits)  # the service did, on another machine

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
        """What lies here; fetched where it does not, or changed since. Of workers that share the folder one fetches."""
        with suppress(InvalidVersionFolder, OSError):
            return load()
        with exclusive_access(self._folder):
            with suppress(InvalidVersionFolder):  # whoever was alone before may have fetched it
                return load()
            fetch()
            return load()


class TaskVersions:
    """The versions and edges of one task: exactly the edges its claim named."""

    def __init__(self, folders: FetchedFolders, new: str, edges: Sequence[WorkEdge]) -> None:
        self._folders = folders
        self._new = new
        self._edges = {edge.old: edge for edge in edges}

    def start(self, old: str) -> RemoteVersion:
        """The version that one of the edges starts from. Raises NoRoute when none was named."""
        named = self._edges.get(old)
        if named is None:
            raise NoRoute(f"no edge from {old!r} to {self._new!r} was named when the chunk was claimed")
        return self._folders.version(old, named.old_card_sha256)

    def by_id(self, version_id: int) -> RemoteVersion:
        """The version of a number that `start` gave."""
        return self._folders.by_id(version_id)

    def sync_edges(self) -> None:
        """A task's edges do not change."""

    def edge(self, key: EdgeKey) -> RemoteEdge | None:
        """The named edge of this key."""
        new, old, kind = key
        if (new, kind) != (self._new, EdgeKind.FORWARD.value) or old not in self._edges:
            return None
        return self._folders.edge(new, self._edges[old])

    def opening(self, edge: Edge) -> AbstractContextManager[None]:
        """One that changed here meanwhile costs the task."""
        return nullcontext()


def _put(place: Path, content: bytes, folder: Path, check: Callable[[Path, Path], None]) -> None:
    """Unpack and check in `place`, then put it where it belongs: whoever is killed leaves no half of it."""
    archive, unpacked = place / "archive.zip", place / "folder"
    archive.write_bytes(content)
    check(archive, unpacked)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unpacked.rename(folder)
