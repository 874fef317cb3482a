"""The state of an import, by which it is resumed after a kill: its `ImportProgress`, and the ids that it has stored.

They are two files, the second locked while the import runs. After each batch that the service has acknowledged, the new
ids are appended first, and then the progress is replaced, which says how much of the ids is valid.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from index.durable import write_whole
from index.errors import InvalidArgument
from index.file_lock import open_locked
from regraft.client import Client
from regraft.sources.base import ItemSource, display_address


@dataclass
class ImportProgress:
    """The progress of an import: rows read, items `stored`, of these `new`, and the rows skipped by reason.

    `cursor` is the position in the source; `examples` names one skipped item per reason. `source` to `update_only`
    identify the import; `created` is the gallery's time of creation, which tells it from a later one of its name.
    `versions` are the version numbers in the file of `StoredIds`, and `ids_bytes` is its valid length. `fields` are the
    wanted metadata fields, with the number of rows that have a value of each.
    """

    source: str
    service: str
    gallery: str
    created: float
    update_only: bool
    cursor: Any = None
    read: int = 0
    stored: int = 0
    new: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    versions: list[str | None] = field(default_factory=list)
    ids_bytes: int = 0
    fields: dict[str, int] = field(default_factory=dict)

    def skip(self, why: str, count: int = 1, example: str | None = None) -> None:
        """Count skipped rows."""
        self.skipped[why] = self.skipped.get(why, 0) + count
        if example is not None:
            self.examples.setdefault(why, example)

    def count_fields(self, metadata: Sequence[Mapping[str, Any] | None]) -> None:
        """Count the rows that have a value of each wanted field."""
        for name in self.fields:
            self.fields[name] += sum(one is not None and name in one for one in metadata)


IDENTITY_FIELDS = ("source", "service", "gallery", "created", "update_only")
"""The fields that identify an import."""


def read_progress(
    client: Client, gallery: str, source: ItemSource, state: Path, *, update_only: bool
) -> ImportProgress:
    """The progress of an interrupted import, or of a new one.

    Raises:
        InvalidArgument: the file `state` is of another import or an earlier release, or the source or gallery changed.
    """
    created = client.gallery(gallery).created
    begun = ImportProgress(source.identity, display_address(client.url), gallery, created, update_only)
    if not state.exists():
        return begun
    try:
        progress = ImportProgress(**json.loads(state.read_text()))
    except (ValueError, TypeError) as error:
        why = f"{state} is not the state of an import, or is of an earlier release: delete it to start over"
        raise InvalidArgument(why) from error
    there, here = ({name: getattr(one, name) for name in IDENTITY_FIELDS} for one in (progress, begun))
    if there != here:
        changed = "; ".join(
            f"{name} was {there[name]}, is {here[name]}" for name in IDENTITY_FIELDS if there[name] != here[name]
        )
        raise InvalidArgument(f"{state} is of another import ({changed}): delete it to start over")
    ids = ids_file(state)
    if progress.ids_bytes > (ids.stat().st_size if ids.exists() else 0):
        raise InvalidArgument(f"{ids} does not match {state}: delete both to start over")
    return progress


def ids_file(state: Path) -> Path:
    """The file of `StoredIds` of an import."""
    return state.with_name(f"{state.name}.ids")


@contextmanager
def locked_ids(state: Path) -> Iterator[BinaryIO]:
    """The file of `StoredIds`, which no other import uses inside this block; an empty one is removed at its end.

    Raises:
        InvalidArgument: another import uses it, or the state cannot be kept there; nothing was stored.
    """
    path = ids_file(state)
    try:
        opened = open_locked(path)
    except OSError as error:
        raise _cannot_keep(state, error) from error
    if opened is None:
        why = f"another import of this source into this gallery is running: it uses {state}; wait until it ends"
        raise InvalidArgument(why, pointer="/state")
    with os.fdopen(opened, "r+b") as file:
        try:
            _check_replaceable(state)
            yield file
        finally:
            if not os.fstat(file.fileno()).st_size:
                with suppress(PermissionError):  # Windows removes no open file
                    path.unlink(missing_ok=True)


def save(state: Path, progress: ImportProgress) -> None:
    """Replace the progress in the file `state`, whole or not at all. Raises Unwritable."""
    write_whole(state, json.dumps(asdict(progress)).encode())


def _check_replaceable(state: Path) -> None:
    try:
        with TemporaryFile(dir=state.parent):
            pass
    except OSError as error:
        raise _cannot_keep(state, error) from error


def _cannot_keep(state: Path, error: OSError) -> InvalidArgument:
    why = f"the position of the import cannot be kept in {state} ({error.strerror}): --state FILE names another"
    return InvalidArgument(why, pointer="/state")


DIGEST = 16
"""Bytes of an id's digest; in memory each takes a hundred bytes, however long the id."""
TEXT = 255
"""Stands for a version's number: a text, which the service embeds."""


class StoredIds:
    """The ids that an import has stored so far, by version.

    The file has a record for each: the version's number in `ImportProgress.versions`, or TEXT, and the id's digest.
    """

    def __init__(self, file: BinaryIO, progress: ImportProgress) -> None:
        """`file`: of `locked_ids`."""
        self._file, self._progress = file, progress
        self._held: defaultdict[int, set[bytes]] = defaultdict(set)
        self._unsaved = bytearray()
        file.seek(0)
        kept = file.read(progress.ids_bytes)
        for start in range(0, progress.ids_bytes, 1 + DIGEST):
            self._held[kept[start]].add(kept[start + 1 : start + 1 + DIGEST])

    def add(self, key: str, version: str | None) -> None:
        """Record a stored embedding."""
        if version not in self._progress.versions:
            self._progress.versions.append(version)
        self._add(self._progress.versions.index(version), key)

    def add_text(self, key: str) -> None:
        """Record a stored text."""
        self._add(TEXT, key)

    def holds(self, key: str, version: str | None) -> bool:
        """Whether the item has an embedding of this version, or a text; then a further row is a duplicate."""
        numbers = [TEXT, *(number for number, name in enumerate(self._progress.versions) if name == version)]
        digest = _digest(key)
        return any(digest in self._held[number] for number in numbers)

    def __contains__(self, key: str) -> bool:
        digest = _digest(key)
        return any(digest in held for held in self._held.values())

    def save(self) -> None:
        """Append the new records; overwrites what a killed process wrote beyond `ImportProgress.ids_bytes`."""
        self._file.seek(self._progress.ids_bytes)
        self._file.write(self._unsaved)
        self._file.truncate()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._progress.ids_bytes += len(self._unsaved)
        self._unsaved.clear()

    def forget(self) -> None:
        """Empty the file."""
        self._file.truncate(0)

    def _add(self, number: int, key: str) -> None:
        digest = _digest(key)
        self._held[number].add(digest)
        self._unsaved += bytes([number]) + digest


def _digest(key: str) -> bytes:
    return blake2b(key.encode(errors="surrogatepass"), digest_size=DIGEST).digest()
