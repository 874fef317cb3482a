"""`SegmentFiles`: sealed segments on disk, so that a start maps indexes into memory instead of building them.

A segment's folder holds its keys, the digests of its vectors, its index, its rows if the index is lossy, and a manifest
with the sha256 of each file, written last; the folder is renamed into place atomically. The files are a cache, SQL is
the source of truth: loaded rows are dead until the change feed, or the digest in the database, confirms each as the
vector of its item.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from index.durable import sync_all
from index.engines.config import IndexConfig
from index.engines.memory import approximate
from index.engines.memory.segment import Segment
from index.engines.memory.tuning import SHARES, TunedIndex
from index.events import Event
from index.incoming import INCOMING, incoming_folder, sweep
from index.paths import paths_in
from index.space import Space
from index.version_folder.folder import sha256

logger = logging.getLogger(__name__)

MANIFEST, KEYS, DIGESTS, ROWS, INDEX = "manifest.json", "keys.npy", "digests.npy", "rows.npy", "index.faiss"
MERGE_REJECTED = "apart"
"""An empty file: merging this segment was tried and rejected."""


class Manifest(BaseModel):
    """The manifest of a segment's files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[3] = 3
    space: dict[str, Any]
    width: int
    rows: int
    config: IndexConfig
    efforts: Annotated[tuple[PositiveInt, ...], Field(min_length=len(SHARES), max_length=len(SHARES))] | None
    recall: float | None
    aims: tuple[PositiveInt, ...] = ()
    long: tuple[PositiveInt, ...] = ()
    provisional: bool = False
    sha256: dict[str, str]


class SegmentFiles:
    """The segments of one shard, each a folder below the shard's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, segment: Segment) -> Segment:
        """Write a segment; returns it memory-mapped from its files. Raises OSError."""
        with incoming_folder(self._folder) as incoming:
            self._write(segment, incoming)
            name = self._folder / incoming.name.removeprefix(INCOMING)
            incoming.rename(name)
            sync_all([self._folder])
        mapped = _open(name, segment.space, segment.dim)
        mapped.share_row_state(segment)
        return mapped

    def mark_merge_rejected(self, segments: Sequence[Segment]) -> None:
        """Record that merging these segments was rejected, so that the next process does not try again."""
        for segment in segments:
            if segment.folder is not None:
                with suppress(OSError):  # removed by another process, or the disk is full
                    (segment.folder / MERGE_REJECTED).touch()

    def load(self, space: Space, dim: int, known: Collection[Path] = ()) -> list[Segment]:
        """Load all segments except the `known` ones, with all rows dead.

        Removes corrupt segments, those of another space, and what killed processes left behind.
        """
        sweep(self._folder)
        unknown = sorted(set(paths_in(self._folder, "*")) - set(known))
        if not unknown:
            return []
        # Hashing takes most of the time and releases the GIL.
        with ThreadPoolExecutor(min(len(unknown), os.cpu_count() or 1)) as threads:
            opened = list(threads.map(partial(_open_or_remove, space=space, dim=dim), unknown))
        return [segment for segment in opened if segment is not None]

    def _write(self, segment: Segment, folder: Path) -> None:
        np.save(folder / KEYS, segment.keys_R)
        np.save(folder / DIGESTS, segment.digests())
        tuned = segment.tuned
        if tuned is not None:
            tuned.index.write(folder / INDEX)
        if tuned is None or tuned.index.rows() is None:
            np.save(folder / ROWS, segment.rows_RW)
        manifest = Manifest(
            space=segment.space.as_json(),
            width=segment.rows_RW.shape[1],
            rows=len(segment.keys_R),
            config=segment.config or IndexConfig(),
            efforts=tuned and tuple(tuned.efforts),
            recall=tuned and tuned.recall,
            aims=tuple(tuned.aims) if tuned else (),
            long=tuple(tuned.long) if tuned else (),
            provisional=segment.provisional,
            sha256={file.name: sha256(file) for file in sorted(folder.iterdir())},
        )
        sync_all(list(folder.iterdir()))
        (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1))
        sync_all([folder / MANIFEST, folder])


def remove(segment: Segment) -> None:
    """Delete the files of a segment, if it has any; memory mapped from them stays readable."""
    if segment.folder is not None:
        shutil.rmtree(segment.folder, ignore_errors=True)


def _open_or_remove(folder: Path, space: Space, dim: int) -> Segment | None:
    try:
        return _open(folder, space, dim)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: FAISS cannot read the index
        logger.warning(Event("snapshot_dropped", folder=folder, reason=error))
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _open(folder: Path, space: Space, dim: int) -> Segment:
    """Open a segment. Raises ValueError, OSError or RuntimeError if it is incomplete or of another space."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except ValidationError as error:
        raise ValueError(f"{MANIFEST}: {error.error_count()} wrong fields") from error
    if (manifest.space, manifest.width) != (space.as_json(), space.width(dim)):
        raise ValueError(f"space {manifest.space}, {manifest.width} numbers a row")
    if changed := [name for name, digest in manifest.sha256.items() if sha256(folder / name) != digest]:
        raise ValueError(f"{changed[0]} changed")
    keys_R, digests_R = np.load(folder / KEYS), np.load(folder / DIGESTS)
    index = approximate.read(folder / INDEX) if manifest.efforts is not None else None
    rows_RW = index.rows() if index is not None else None
    if rows_RW is None:
        rows_RW = np.load(folder / ROWS, mmap_mode="r")
    if rows_RW.shape != (manifest.rows, manifest.width) or {keys_R.shape, digests_R.shape} != {(manifest.rows,)}:
        raise ValueError("files of different lengths")
    # Slots are set when rows are revived.
    segment = Segment(space, rows_RW, keys_R, np.zeros_like(keys_R), digests_R=digests_R)
    segment.config, segment.folder = manifest.config, folder
    segment.merge_rejected, segment.provisional = (folder / MERGE_REJECTED).exists(), manifest.provisional
    files = sum((folder / name).stat().st_size for name in manifest.sha256)
    segment.stored_bytes = max(0, files - rows_RW.nbytes)
    if index is not None:
        segment.tuned = TunedIndex(index, manifest.efforts or (), manifest.recall or 0.0, manifest.aims, manifest.long)
    segment.mark_all_dead()
    return segment
