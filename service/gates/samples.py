"""What a gate measures on: items of the gallery, or an evaluation set, embedded by every version that takes part.

Each of the N entries is both a query and an item, and is left out of its own ranking. Arrays are (N, dimension).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL.Image import Image
from sqlalchemy import Connection, Row, false, select

from index.encoder import BATCH, Embedded, Encoder
from index.errors import InvalidArgument, InvalidImage, RegraftError
from index.filter import value_at
from index.image import decode_image
from service.blobs import Blobs
from service.listed import blocks
from service.stored import STORED, from_bytes
from service.tables import evaluation, evaluation_embedding, evaluation_entry, item
from service.versions.catalog import Catalog, Registered

READ_BLOCK = 1_000
TIMED = 50
"""Images that each encoder is timed on, one at a time."""


class UnknownEvaluation(RegraftError):
    """The gallery has no evaluation set of this number."""

    status = 404
    code = "unknown_evaluation"


@dataclass(frozen=True)
class Entry:
    """One entry: where its image lies (None: there is none), its label and its slice as JSON texts.

    `number` is the key of the item it is, or its place in the evaluation set.
    """

    number: int
    blob: str | None
    label: str | None
    slice: str | None


@dataclass(frozen=True)
class Sample:
    """N entries, embedded.

    Attributes:
        entries: (N,) what was embedded.
        embedded: version name -> its embeddings of all entries.
        labels: (N,), None where they are unknown.
        slices: (N,), None for an entry in no slice.
        latency_ms: version name -> p50 and p99 of encoding one image, where images were encoded.
        unreadable: how many entries were left out, because their image is gone or cannot be read.
        unlabelled: how many entries were left out, because they have no label and others do.
    """

    entries: Sequence[Entry]
    embedded: Mapping[str, Embedded]
    labels: Sequence[str] | None
    slices: Sequence[str | None]
    latency_ms: Mapping[str, Mapping[str, float]]
    unreadable: int
    unlabelled: int = 0

    def __len__(self) -> int:
        return len(self.entries)


def draw(
    connection: Connection, gallery_id: int, label: str | None, slice_field: str | None, sample: int, seed: int
) -> list[Entry]:
    """Up to `sample` live items that hold an image and the metadata field `label`, in an order drawn by `seed`.

    Raises:
        InvalidArgument: there are fewer than two.
    """
    has_image = (item.c.gallery_id == gallery_id, item.c.deleted == false(), item.c.blob.is_not(None))
    ids = np.fromiter(connection.execute(select(item.c.id).where(*has_image).order_by(item.c.id)).scalars(), np.int64)
    drawn: list[Entry] = []
    for block in blocks(np.random.default_rng(seed).permutation(ids).tolist(), READ_BLOCK):
        rows = connection.execute(select(item.c.id, item.c.blob, item.c.metadata).where(item.c.id.in_(block)))
        found = {row.id: row for row in rows if label is None or value_at(row.metadata, label) is not None}
        drawn += [_entry(found[i], label, slice_field) for i in block if i in found]
        if len(drawn) >= sample:
            break
    if len(drawn) < 2:
        wanted = "with an image" + (f" and metadata field {label!r}" if label else "")
        raise InvalidArgument(f"measuring needs two items {wanted}; the gallery has {len(drawn)}", pointer="/label")
    return drawn[:sample]


def evaluation_row(connection: Connection, gallery_id: int, number: int) -> Row[Any]:
    """The row of a gallery's evaluation set. Raises UnknownEvaluation."""
    mine = (evaluation.c.id == number, evaluation.c.gallery_id == gallery_id)
    row = connection.execute(select(evaluation).where(*mine)).first()
    if row is None:
        raise UnknownEvaluation(f"this gallery has no evaluation set {number}")
    return row


def read_entries(connection: Connection, evaluation_id: int, slice_field: str | None) -> list[Entry]:
    """The entries of an evaluation set."""
    mine = select(evaluation_entry).where(evaluation_entry.c.evaluation_id == evaluation_id)
    rows = connection.execute(mine.order_by(evaluation_entry.c.number))
    return [
        Entry(
            row.number, row.blob, None if row.label is None else as_text(row.label), _field(row.metadata, slice_field)
        )
        for row in rows
    ]


def labelled_ones(entries: Sequence[Entry]) -> Sequence[Entry]:
    """The entries that have a label, as items without one are left out too; all of them where fewer than two have."""
    labelled = [entry for entry in entries if entry.label is not None]
    return labelled if len(labelled) >= 2 else entries


def embed(
    blobs: Blobs, max_pixels: int, entries: Sequence[Entry], versions: Sequence[Registered], timed: int = TIMED
) -> Sample:
    """Encode the entries' images by each version; those that cannot be read are left out.

    `timed` images are also encoded one at a time, for the latencies.

    Raises:
        NoEncoder: one of the versions takes embeddings only.
        StoreUnreachable: it cannot be told whether they can.
    """
    encoders = {version.name: version.encoder() for version in versions}
    parts: dict[str, list[Embedded]] = {name: [] for name in encoders}
    kept: list[Entry] = []
    seconds: dict[str, list[float]] = {name: [] for name in encoders}
    for block in blocks(entries, BATCH):
        readable = [(image, entry) for entry in block if (image := _read(blobs, max_pixels, entry.blob)) is not None]
        images = [image for image, _ in readable]
        for name, encoder in encoders.items():
            parts[name].append(encoder.encode(images))
            seconds[name] += _timed(encoder, images[: timed - len(seconds[name])])
        kept += [entry for _, entry in readable]
    embedded = {name: _joined(found) for name, found in parts.items()}
    return _sample(embedded, kept, _quantiles(seconds), len(entries) - len(kept))


def read_embeddings(
    connection: Connection, catalog: Catalog, evaluation_id: int, entries: Sequence[Entry], needed: Sequence[Registered]
) -> Sample:
    """The embeddings of these entries of an evaluation set that came without images.

    Raises:
        InvalidArgument: it holds none of a version that is needed.
    """
    mine = select(evaluation_embedding).where(evaluation_embedding.c.evaluation_id == evaluation_id)
    versions = {row.version_id: row.vectors for row in connection.execute(mine)}
    if missing := [version.name for version in needed if version.id not in versions]:
        held = ", ".join(sorted(catalog.by_id(v).name for v in versions))
        why = f"evaluation {evaluation_id} holds no embeddings of {' and '.join(map(repr, missing))} (it has: {held})"
        raise InvalidArgument(why, pointer="/evaluation")
    rows = [entry.number for entry in entries]
    embedded = {}
    for version in map(catalog.by_id, versions):
        stored = versions[version.id]
        vectors = from_bytes([stored], len(stored) // STORED.itemsize).reshape(-1, version.card.dim)
        embedded[version.name] = Embedded(vectors[rows], None)
    return _sample(embedded, entries, {}, 0)


def as_text(value: Any) -> str:
    """Any JSON value as something that sorts: 1 and "1" stay different."""
    return json.dumps(value, sort_keys=True)


def _sample(
    embedded: Mapping[str, Embedded],
    entries: Sequence[Entry],
    latency_ms: Mapping[str, Mapping[str, float]],
    unreadable: int,
) -> Sample:
    labels = [entry.label for entry in entries if entry.label is not None]
    slices = [entry.slice for entry in entries]
    return Sample(entries, embedded, labels if len(labels) == len(entries) else None, slices, latency_ms, unreadable)


def _entry(row: Row[*tuple[Any, ...]], label: str | None, slice_field: str | None) -> Entry:
    return Entry(row.id, row.blob, _field(row.metadata, label), _field(row.metadata, slice_field))


def _field(metadata: Mapping[str, Any], name: str | None) -> str | None:
    found = None if name is None else value_at(metadata, name)
    return None if found is None else as_text(found)


def _read(blobs: Blobs, max_pixels: int, blob: str | None) -> Image | None:
    try:
        return decode_image(blobs.read(blob or ""), max_pixels=max_pixels)
    except (OSError, InvalidImage):
        return None


def _timed(encoder: Encoder, images: Sequence[Image]) -> list[float]:
    """How long each image takes by itself, from decoded pixels to its embedding."""
    seconds = []
    for image in images:
        started = time.perf_counter()
        encoder.encode([image])
        seconds.append(time.perf_counter() - started)
    return seconds


def _quantiles(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"p50": 1000 * float(np.quantile(took, 0.5)), "p99": 1000 * float(np.quantile(took, 0.99))}
        for name, took in seconds.items()
        if took
    }


def _joined(parts: Sequence[Embedded]) -> Embedded:
    side = [p.side for p in parts if p.side is not None]
    return Embedded(np.concatenate([p.vectors for p in parts]), np.concatenate(side) if side else None)
