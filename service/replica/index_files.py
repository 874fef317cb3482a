"""Files of indexes on disk: the lock of a gallery's folder, and the removal of files that nobody reads again.

A gallery in memory removes the files of its own emptied shards (`Gallery.sweep_files`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from index.file_lock import try_lock
from index.paths import paths_in
from service.store.database.connections import Database
from service.store.galleries.gallery import gallery_states
from service.store.galleries.held_versions import holds_version_named, retired_versions, version_names


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Take a folder's lock if it is free; yields whether it is taken. The system frees it when the process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield try_lock(file)  # without locks every process builds, as if each had its own disk
    finally:
        os.close(file)


def sweep(database: Database, indexes: Path, in_memory: Callable[[int], bool]) -> None:
    """Remove the files of deleted galleries, and in galleries that are not `in_memory` those of freed versions."""
    # Before the galleries are read: others may be created meanwhile.
    folders, shards = set(indexes.glob("*")), paths_in(indexes, "*/*")
    with database.lookup() as connection:
        used = {indexes / str(gallery_id) for gallery_id in gallery_states(connection)}
        retired, names = retired_versions(connection), version_names(connection)
    for folder in folders - used:
        shutil.rmtree(folder, ignore_errors=True)
    for folder in shards:
        gallery, name = folder.parent, folder.name
        if gallery in used and ((int(gallery.name), name) in retired or name not in names):
            _remove_unless_held(database, folder, in_memory)


def _remove_unless_held(database: Database, folder: Path, in_memory: Callable[[int], bool]) -> None:
    gallery_id = int(folder.parent.name)
    with locked(folder.parent) as is_locked:  # so that no other process writes a new index there
        if not is_locked or in_memory(gallery_id):
            return
        with database.lookup() as connection:
            held = holds_version_named(connection, gallery_id, folder.name)
        if not held:
            shutil.rmtree(folder, ignore_errors=True)
