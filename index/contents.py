"""`Contents`: items and what they hold but for the vectors, as columns: what a start reads, of SQL or of a snapshot.

A snapshot is a folder of the columns of a whole gallery at one number of its change feed, and a manifest, written last,
with that number and the sha256 of each file. Its name is the sha256 of the manifest: whoever notes the name in the
database knows later that every byte is what this gallery held then.

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
from index.folder import sha256
from index.incoming import incoming_folder
from index.kept_items import NOBODY
from index.scan import Mask
from index.version import ShardKey

Keys = NDArray[np.int64]

HeldBySlot = tuple[Keys, Callable[[], Keys]]
"""Embeddings of a shard (M,): the slots of their items, and what gives their digests."""
MANIFEST = "manifest.json"


class HeldColumns(NamedTuple):
    """The embeddings of one shard: of which of the items (M,), and their digests (M,), see `index.engines.digest`."""

    items_M: Keys
    digests_M: Keys


@dataclass(frozen=True)
class Contents:
    """Some items (N,) of a gallery, and what they hold.

    Attributes:
        keys_N: of the items, all different.
        seqs_N: the number of each one's last write in the change feed.
        texts: UTF-8 of JSON and ids, in any order.
        places_N3: where in `texts` the JSON of an item begins, where its id does, and where that ends.
        held: by version and origin.
    """

    keys_N: Keys
    seqs_N: Keys
    texts: NDArray[np.uint8]
    places_N3: Keys
    held: Mapping[ShardKey, HeldColumns]

    def only(self, kept_N: Mask) -> Contents:
        """The same of some of the items."""
        if kept_N.all():
            return self
        place_N = np.cumsum(kept_N) - 1
        held = {}
        for place, (items_M, digests_M) in self.held.items():
            kept_M = kept_N[items_M]
            held[place] = HeldColumns(place_N[items_M[kept_M]], digests_M[kept_M])
        return Contents(self.keys_N[kept_N], self.seqs_N[kept_N], self.texts, self.places_N3[kept_N], held)


def of_slots(slots: Contents, held: Mapping[ShardKey, Sequence[HeldBySlot]]) -> Contents:
    """The contents of a gallery, of all its slots, of which some are empty, and of what they hold."""
    columns = {}
    for place, parts in held.items():
        slots_P, digests_P = zip(*((slots_M, digests()) for slots_M, digests in parts), strict=True)
        columns[place] = HeldColumns(np.concatenate(slots_P), np.concatenate(digests_P))
    return replace(slots, held=columns).only(slots.keys_N != NOBODY)


class ContentsManifest(BaseModel):
    """What lies beside the columns of a snapshot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    seq: int
    held: list[ShardKey]
    sha256: dict[str, str]


def write(contents: Contents, seq: int, folder: Path) -> str:
    """Write a snapshot at a number of the feed into a folder of them; returns its name. OSError: the disk is full."""
    with incoming_folder(folder) as incoming:
        for name, column in _columns(contents).items():
            np.save(incoming / f"{name}.npy", column)
        files = sorted(incoming.iterdir())
        hashes = {file.name: sha256(file) for file in files}
        text = ContentsManifest(seq=seq, held=list(contents.held), sha256=hashes).model_dump_json(indent=1)
        sync_all(files)
        (incoming / MANIFEST).write_text(text)
        sync_all([incoming / MANIFEST, incoming])
        name = hashlib.sha256(text.encode()).hexdigest()
        if not (folder / name).exists():
            incoming.rename(folder / name)
        sync_all([folder])
    return name


def read(folder: Path) -> tuple[Contents, int]:
    """A snapshot, mapped from its files, and its number of the feed. OSError or ValueError: it is not whole."""
    manifest = manifest_of(folder)
    names = list(manifest.sha256)
    with ThreadPoolExecutor(min(len(names), os.cpu_count() or 1)) as threads:  # hashing takes no interpreter
        hashes = threads.map(lambda name: sha256(folder / name), names)
        if changed := [name for name, found in zip(names, hashes, strict=True) if found != manifest.sha256[name]]:
            raise ValueError(f"{changed[0]} changed")

    def column(name: str) -> NDArray[Any]:
        return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))

    held = {}
    for number, place in enumerate(manifest.held):
        held[place] = HeldColumns(column(f"held-{number}-items"), column(f"held-{number}-digests"))
    return Contents(column("keys"), column("seqs"), column("texts"), column("places"), held), manifest.seq


def manifest_of(folder: Path) -> ContentsManifest:
    """What a snapshot says of itself. OSError or ValueError: it was changed."""
    text = (folder / MANIFEST).read_bytes()
    if hashlib.sha256(text).hexdigest() != folder.name:
        raise ValueError(f"{MANIFEST} changed")
    try:
        return ContentsManifest.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{MANIFEST}: {error.error_count()} wrong fields") from error


def _columns(contents: Contents) -> dict[str, NDArray[Any]]:
    columns: dict[str, NDArray[Any]] = {"keys": contents.keys_N, "seqs": contents.seqs_N}
    columns |= {"texts": contents.texts, "places": contents.places_N3}
    for number, (items_M, digests_M) in enumerate(contents.held.values()):
        columns |= {f"held-{number}-items": items_M, f"held-{number}-digests": digests_M}
    return columns
