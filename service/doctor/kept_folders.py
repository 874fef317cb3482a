"""Check folders of versions and edges in the image store, which serve machines without a shared disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from index.errors import InvalidVersionFolder
from index.version import CARD, EDGE
from index.version_folder.folder import files_of, load_version
from service.doctor.findings import Context, Finding, remove_orphans, until_store_is_away
from service.doctor.on_disk import KeysOnDisk
from service.registry.edge_records import EdgeRecord
from service.registry.fetched_folders import edge_key, version_key
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.store.image_store.object_store import FOLDERS


class StoredFolder(NamedTuple):
    """A folder that other machines may fetch; `is_whole`: whether a fetched copy is as accepted."""

    name: str
    key: str
    here: Path
    problem: str
    needed: str
    is_whole: Callable[[Path], bool]


def check(context: Context, fix: bool) -> list[Finding]:
    """`folder_missing`, `folder_unknown`, `store_unreachable`; none if the image store is on this machine."""
    folders = context.registry.folders
    if not folders.is_remote:
        return []
    missing = Finding(
        "folder_missing",
        "warning",
        "folders of versions or edges are missing or damaged in the image store: other machines cannot load them",
        "--fix stores those that are intact on this machine",
        fixable=True,
    )
    what = "folders in the image store that belong to no version or edge"
    unknown = Finding("folder_unknown", "info", what, "--fix removes them", fixable=True)
    advice = "no version or edge has a folder in this store: check that it belongs to this database; --fix keeps them"
    findings = [missing, unknown]
    with until_store_is_away(findings), closing(KeysOnDisk()) as stored:
        context.blobs.check()
        # Listed before the rows are read: every listed folder has its row by then.
        stored.put(context.blobs.all_folders())
        context.registry.sync()
        for stored_folder in _expected_folders(context.registry):
            if stored.name(f"{FOLDERS}{stored_folder.key}.zip") and _is_whole(context.registry, stored_folder):
                continue
            missing.add(stored_folder.name)
            if fix and not stored_folder.problem:
                folders.put(stored_folder.here, stored_folder.key)
                missing.fixed += 1
        remove_orphans(context, unknown, stored, advice, fix=fix)
    return findings


def _expected_folders(registry: Registry) -> Iterator[StoredFolder]:
    for version in registry.all():
        key = version_key(version.card_sha256)
        yield StoredFolder(
            version.name, key, version.version.folder, version.problem, CARD, partial(_is_version, version)
        )
    for declared in registry.edges():
        folder = declared.edge.folder
        if declared.files and folder is not None:
            key = edge_key(folder.relative_to(registry.edges_folder).as_posix())
            name = "/".join(declared.edge.key)
            yield StoredFolder(name, key, folder, declared.problem, EDGE, partial(_is_edge, declared))


def _is_version(registered: LoadedVersion, folder: Path) -> bool:
    load_version(folder, expect_card=registered.card_sha256)  # which hashes every file
    return True


def _is_edge(declared: EdgeRecord, folder: Path) -> bool:
    return files_of(folder) == dict(declared.files)


def _is_whole(registry: Registry, stored_folder: StoredFolder) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        unpacked = Path(scratch) / stored_folder.here.name
        try:
            return registry.folders.fetch(stored_folder.key, unpacked, stored_folder.needed) and stored_folder.is_whole(
                unpacked
            )
        except InvalidVersionFolder:
            return False
