"""`Contents`: the items of a gallery and their embeddings without vectors, as columns that are read at a start.

They come from SQL or from a snapshot (`write`, `read`): a folder with the columns of a whole gallery at one number of
its change feed, and a manifest, written last, with that number and the sha256 of each file. The folder is named by the
sha256 of its manifest. So if that name is in the database, every byte is what the gallery held then.

Shape suffixes: N items, M embeddings of one shard.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from index.durable import sync_all
from index.incoming import incoming_folder
from index.item_table import NO_ITEM
from index.scan import Mask
from index.version import ShardKey
from index.version_folder.folder import sha256

Keys = NDArray[np.int64]

SlotsAndDigests = tuple[Keys, Callable[[], Keys]]
"""Embeddings of a shard: the slots of their items (M,), and a function that returns their digests (M,)."""
MANIFEST = "manifest.json"


class ShardColumns(NamedTuple):
    """The embeddings of one shard: positions of their items (M,) and digests (M,), see `index.engines.digest`."""

    items_M: Keys
    digests_M: Keys


@dataclass(frozen=True)
class Contents:
    """Some items (N,) of a gallery, with their embeddings.

    Attributes:
        keys_N: keys of the items, distinct.
        seqs_N: change feed number of the last write of each item.
        texts: metadata (JSON) and ids in UTF-8, in any order.
        text_offsets_N3: offsets in `texts` of an item's metadata, of its id, and of the end of its id.
        embeddings: by version and origin.
    """

    keys_N: Keys
    seqs_N: Keys
    texts: NDArray[np.uint8]
    text_offsets_N3: Keys
    embeddings: Mapping[ShardKey, ShardColumns]

    def select(self, kept_N: Mask) -> Contents:
        """The contents of some of the items."""
        if kept_N.all():
            return self
        place_N = np.cumsum(kept_N) - 1
        held = {}
        for place, (items_M, digests_M) in self.embeddings.items():
            kept_M = kept_N[items_M]
            held[place] = ShardColumns(place_N[items_M[kept_M]], digests_M[kept_M])
        return Contents(self.keys_N[kept_N], self.seqs_N[kept_N], self.texts, self.text_offsets_N3[kept_N], held)


def from_slots(slots: Contents, held: Mapping[ShardKey, Sequence[SlotsAndDigests]]) -> Contents:
    """The contents of a gallery, from all its slots (free ones are dropped) and its embeddings by slot."""
    columns = {}
    for place, parts in held.items():
        slots_P, digests_P = zip(*((slots_M, digests()) for slots_M, digests in parts), strict=True)
        columns[place] = ShardColumns(np.concatenate(slots_P), np.concatenate(digests_P))
    return replace(slots, embeddings=columns).select(slots.keys_N != NO_ITEM)


class ContentsManifest(BaseModel):
    """The manifest of a snapshot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    seq: int
    held: list[ShardKey]
    sha256: dict[str, str]


def write(contents: Contents, seq: int, folder: Path) -> str:
    """Write a snapshot at the feed number `seq` below the folder of snapshots; returns its name. Raises OSError."""
    with incoming_folder(folder) as incoming:
        for name, column in _columns(contents).items():
            np.save(incoming / f"{name}.npy", column)
        files = sorted(incoming.iterdir())
        hashes = {file.name: sha256(file) for file in files}
        text = ContentsManifest(seq=seq, held=list(contents.embeddings), sha256=hashes).model_dump_json(indent=1)
        sync_all(files)
        (incoming / MANIFEST).write_text(text)
        sync_all([incoming / MANIFEST, incoming])
        name = hashlib.sha256(text.encode()).hexdigest()
        if not (folder / name).exists():
            incoming.rename(folder / name)
        sync_all([folder])
    return name


def read(folder: Path) -> tuple[Contents, int]:
    """Read a snapshot, memory-mapped, and its feed number. Raises OSError or ValueError if it is incomplete."""
    manifest = manifest_of(folder)
    names = list(manifest.sha256)
    with ThreadPoolExecutor(min(len(names), os.cpu_count() or 1)) as threads:  # hashing releases the GIL
        hashes = threads.map(lambda name: sha256(folder / name), names)
        if changed := [name for name, found in zip(names, hashes, strict=True) if found != manifest.sha256[name]]:
            raise ValueError(f"{changed[0]} changed")

    def column(name: str) -> NDArray[Any]:
        return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))

    held = {}
    for number, place in enumerate(manifest.held):
        held[place] = ShardColumns(column(f"held-{number}-items"), column(f"held-{number}-digests"))
    return Contents(column("keys"), column("seqs"), column("texts"), column("places"), held), manifest.seq


def manifest_of(folder: Path) -> ContentsManifest:
    """Read the manifest of a snapshot. Raises OSError or ValueError if it was changed."""
    text = (folder / MANIFEST).read_bytes()
    if hashlib.sha256(text).hexdigest() != folder.name:
        raise ValueError(f"{MANIFEST} changed")
    try:
        return ContentsManifest.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{MANIFEST}: {error.error_count()} wrong fields") from error


def _columns(contents: Contents) -> dict[str, NDArray[Any]]:
    columns: dict[str, NDArray[Any]] = {"keys": contents.keys_N, "seqs": contents.seqs_N}
    columns |= {"texts": contents.texts, "places": contents.text_offsets_N3}
    for number, (items_M, digests_M) in enumerate(contents.embeddings.values()):
        columns |= {f"held-{number}-items": items_M, f"held-{number}-digests": digests_M}
    return columns
