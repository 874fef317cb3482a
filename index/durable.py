"""Make files survive a kill and a power cut."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from index.errors import Unwritable
from index.file_lock import locked

SYNCS = 16
"""Files synchronised in parallel."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what the block writes there replaces `path` if the block succeeds.

    At any moment, also after a kill or a power cut, `path` is what it was before, or all that the block wrote. Missing
    folders are made. Processes that write the same file take turns, and overwrite what a killed one left.

    Raises:
        Unwritable: an OSError in the block, such as a full disk; `path` is what it was before.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(part):
            try:
                yield part
                _sync(part)
                part.replace(path)
            except BaseException:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
                raise
            with suppress(OSError):  # not every file system can synchronise a folder
                _sync(path.parent)
    except OSError as error:
        raise Unwritable(f"{path} could not be written: {error.strerror or error}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all; see `whole_file`. Raises Unwritable."""
    with whole_file(path) as part:
        part.write_bytes(content)


def sync_all(paths: Sequence[Path]) -> None:
    """Call fsync on files (their content) and folders (the names in them)."""
    # In parallel the file system serves many calls by one write of its journal: 8 times as fast.
    with ThreadPoolExecutor(SYNCS) as threads:
        for done in [threads.submit(_sync, path) for path in paths]:
            done.result()


def _sync(path: Path) -> None:
    if sys.platform == "win32":  # no folder can be opened there, and fsync needs a file opened for writing
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
