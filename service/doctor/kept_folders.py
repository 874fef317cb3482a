"""Folders of versions and edges as they are kept for machines that share no disk: gone, damaged, or of nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from index.errors import InvalidVersionFolder
from index.folder import files_of, load_version
from index.version import CARD, EDGE
from service.doctor.findings import Context, Finding, remove_orphans
from service.doctor.on_disk import KeysOnDisk
from service.registry.brought import edge_key, version_key
from service.registry.edge_records import EdgeRecord
from service.registry.registry import LoadedVersion, Registry
from service.store.blobs import StoreUnreachable
from service.store.object_store import FOLDERS


class Kept(NamedTuple):
    """A folder that another machine may ask for: what it is of, and whether what was brought is what was accepted."""

    name: str
    key: str
    here: Path
    problem: str
    needed: str
    is_whole: Callable[[Path], bool]


def check(context: Context, fix: bool) -> list[Finding]:
    """`folder_missing`, `folder_unknown`; nothing where images lie on this machine, or are out of reach."""
    folders = context.registry.folders
    if not folders.far:
        return []
    missing = Finding(
        "folder_missing",
        "warning",
        "folders of versions or edges are not in the image store, or damaged there: no other machine gets them",
        "--fix stores those that are whole on this machine",
        fixable=True,
    )
    what = "folders in the image store that no version or edge names"
    unknown = Finding("folder_unknown", "info", what, "--fix removes them", fixable=True)
    advice = "nothing names any folder here: is it the store of this database? --fix leaves them"
    try:
        context.blobs.check()
        with closing(KeysOnDisk()) as stored:
            # What is stored is listed first: one that comes meanwhile has a row by then.
            stored.put(context.blobs.all_folders())
            context.registry.sync()
            for kept in _kept(context.registry):
                if stored.name(f"{FOLDERS}{kept.key}.zip") and _is_whole(context.registry, kept):
                    continue
                missing.add(kept.name)
                if fix and not kept.problem:
                    folders.keep(kept.here, kept.key)
                    missing.fixed += 1
            return [missing, remove_orphans(context, unknown, stored, advice, fix=fix)]
    except StoreUnreachable:  # told by who looks at the images
        return []


def _kept(registry: Registry) -> Iterator[Kept]:
    for one in registry.all():
        key = version_key(one.card_sha256)
        yield Kept(one.name, key, one.version.folder, one.problem, CARD, partial(_same, one))
    for declared in registry.edges():
        folder = declared.edge.folder
        if declared.files and folder is not None:
            key = edge_key(folder.relative_to(registry.edges_folder).as_posix())
            name = "/".join(declared.edge.key)
            yield Kept(name, key, folder, declared.problem, EDGE, partial(_holds, declared))


def _same(registered: LoadedVersion, place: Path) -> bool:
    load_version(place, expect_card=registered.card_sha256)  # which hashes every file
    return True


def _holds(declared: EdgeRecord, place: Path) -> bool:
    return files_of(place) == dict(declared.files)


def _is_whole(registry: Registry, kept: Kept) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / kept.here.name
        try:
            return registry.folders.bring(kept.key, place, kept.needed) and kept.is_whole(place)
        except InvalidVersionFolder:
            return False
